"""How a batch of decodes is cut into parts for the programs of one launch."""

"""Split of a batch of decodes into parts for the programs of one launch."""

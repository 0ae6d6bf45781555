"""How much each block of a request matters to its next token: its share of attention, measured or estimated."""

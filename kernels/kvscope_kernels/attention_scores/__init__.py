"""Share of attention that each block of a request gets from its next token, measured or estimated."""

"""How much each block of a request matters to its next token: what fell on it."""

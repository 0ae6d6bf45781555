"""Share of the attention of a request's next token that each block of the request gets, measured or estimated."""

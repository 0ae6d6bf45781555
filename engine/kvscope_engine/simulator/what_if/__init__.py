"""What the requests of a running engine would take of its memory under other allocation policies."""

"""Analyses the prompts of a request file: which prefixes they share, and how large a KV cache must be to use that."""

"""The engine: a model on a paged KV cache that tells everything about each block."""

"""The page map: one cell a block of the KV cache."""

"""Page map: one cell per block of the KV cache."""

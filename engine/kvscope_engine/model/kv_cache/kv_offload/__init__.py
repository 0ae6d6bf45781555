"""The bytes of the lower tiers of the KV cache: host memory and disk."""

"""Lower tiers of the KV cache: host memory and disk."""

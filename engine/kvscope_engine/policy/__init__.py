"""Requests, block pool, prefix index and scheduler: they decide who gets which block, and who runs. No tensors."""

"""Requests, block pool, prefix index and scheduler: who gets which block, and who runs. No tensors."""

"""Requests, block pool, prefix index and scheduler: they decide which request gets which block and which requests run.

No tensors.
"""

"""Paged KV cache operations: each a Triton kernel beside its torch reference, chosen once by `ops_for`."""

from kvscope_kernels.dispatch import Ops, ops_for

__all__ = ["Ops", "ops_for"]

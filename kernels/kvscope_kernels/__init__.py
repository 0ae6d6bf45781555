"""Paged KV cache operations: Triton kernels, C operations and torch references, selected by `ops_for`."""

from kvscope_kernels.dispatch import Ops, ops_for

__all__ = ["Ops", "ops_for"]

"""Limits of a step, from which buffers, block tables and CUDA graphs are sized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Maximum sizes of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_request_tokens: int
    """Maximum number of tokens of one request: the capacity of the pool, limited by the model's maximum length."""
    block_size: int
    num_groups: int = 1
    max_drafts: int = 0
    """Maximum number of draft tokens per request. A step with drafts samples at most max(1 + max_drafts, max_num_seqs)
    rows."""
    has_experts: bool = False
    """Whether the model has a mixture of experts. The tiles of its kernels grow with the number of tokens in a step."""

    @property
    def max_request_blocks(self) -> int:
        return -(-self.max_request_tokens // self.block_size)

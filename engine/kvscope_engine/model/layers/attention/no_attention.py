"""Attention without a KV cache, for runs that only measure or trace a model's other layers."""

from __future__ import annotations

import torch

from kvscope_engine.model.layers.attention.paged_attention import AttentionContext, AttentionOptions
from kvscope_kernels.rotate_write import Rotation


class NoAttention(AttentionContext):
    """Attention context that uses no KV cache and returns zeros."""

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest
        """Number of tokens of the longest request. It determines the size of calls of a model that runs its own forward
        code.
        """
        self.scratch: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], options.value_dim(value))

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        options: AttentionOptions,
    ) -> torch.Tensor:
        # The real operation has the query in memory in addition to its result.
        query = heads.new_empty(len(heads), rotation.num_heads, heads.shape[-1])
        return torch.zeros_like(query)

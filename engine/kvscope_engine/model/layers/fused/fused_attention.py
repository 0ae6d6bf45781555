"""Attention module with few operations: one matmul for q, k and v, and one rotation for q and k together.

Supports variants with or without q and k norms, and with or without rotation; `fuse` determines the variant of a
module. The `AttentionContext` computes attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.layers.attention.paged_attention import AttentionContext, AttentionOptions, layer_of
from kvscope_engine.model.layers.fused.fused_norm import norm_eps
from kvscope_engine.model.layers.fused.packed_linear import FastLinear, fast_linear
from kvscope_kernels.rotate_write import CosSin, HeadNorm, Rotation

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]


class FusedAttention(nn.Module):
    """Replaces an attention module that has q_proj, k_proj, v_proj and o_proj. It is called with the same keywords."""

    def __init__(
        self,
        attention: nn.Module,
        options: AttentionOptions,
        products: tuple[FastLinear, FastLinear],
        *,
        rotates: bool,
        norm: HeadNorm | None,
    ) -> None:
        """Create the replacement of `attention`.

        Args:
            products: The fused q, k and v projection, and the output projection.
            rotates: Whether queries and keys are rotated.
            norm: Norms of queries and keys; None if the module has none.
        """
        super().__init__()
        projections: list[Any] = [getattr(attention, name) for name in ("q_proj", "k_proj")]
        self.layer = layer_of(attention)
        self.head_dim = int(attention.head_dim)  # type: ignore[arg-type]
        self.num_query_heads, self.num_kv_heads = (p.out_features // self.head_dim for p in projections)
        self.qkv, self.o = products
        self.options = options
        self.rotates = rotates
        self.norm = norm

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: PositionEmbeddings, *, paged: AttentionContext, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Map (1, T, hidden) to (1, T, hidden), with the result type of transformers' attention modules."""
        return self.o(self.attend(hidden_states[0], position_embeddings, paged))[None], None

    def attend(
        self, tokens: torch.Tensor, position_embeddings: PositionEmbeddings, paged: AttentionContext
    ) -> torch.Tensor:
        """Return the attention output (T, Hq * D), before the output projection, for tokens (T, hidden)."""
        count = tokens.shape[0]
        heads = self.qkv(tokens).view(count, -1, self.head_dim)
        cos_sin = cos_sin_of(position_embeddings, self.head_dim, paged) if self.rotates else None
        rotation = Rotation(self.num_query_heads, self.norm, cos_sin)
        return paged.attend_fused(self.layer, heads, rotation, self.options).reshape(count, -1)


def cos_sin_of(position_embeddings: PositionEmbeddings, head_dim: int, paged: AttentionContext) -> CosSin:
    """Return cos and signed sin, (T, 1, D). They are computed once per step for each pair that the model passes."""
    cos, sin = position_embeddings
    cached = paged.scratch.get(id(cos))
    if cached is None:
        half = head_dim // 2
        sin_half = sin[0, :, None, :half]
        cos_full = torch.cat((cos, cos), dim=-1) if cos.shape[-1] == half else cos
        cached = (cos, cos_full[0, :, None], torch.cat((-sin_half, sin_half), dim=-1))
        paged.scratch[id(cos)] = cached
    return CosSin(cached[1], cached[2])


def attention_candidates(attention: nn.Module, options: AttentionOptions, packed: bool) -> Iterator[FusedAttention]:
    """Yield the fused variants that `attention` may correspond to, if it has the expected submodules. All share the
    same fused weights.
    """
    projections: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if not all(type(projection) is nn.Linear for projection in projections):
        return
    if not isinstance(getattr(attention, "head_dim", None), int):
        return
    products = fast_linear(projections[:3], packed), fast_linear(projections[3:], packed)
    for norm in _norms(attention):
        for rotates in (True, False):
            yield FusedAttention(attention, options, products, rotates=rotates, norm=norm)


def _norms(attention: nn.Module) -> Iterator[HeadNorm | None]:
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q_norm is None and k_norm is None:
        yield None
    elif isinstance(q_norm, nn.Module) and isinstance(k_norm, nn.Module):
        yield from _fused_norms(attention, q_norm, k_norm)


def _fused_norms(attention: nn.Module, q_norm: nn.Module, k_norm: nn.Module) -> Iterator[HeadNorm]:
    """Yield the norms of q and k as one norm with a weight per head. Yields nothing unless each norm works on single
    heads.
    """
    head_dim: Any = attention.head_dim
    eps = norm_eps(q_norm)
    weights = [getattr(norm, "weight", None) for norm in (q_norm, k_norm)]
    if eps is None or eps != norm_eps(k_norm):
        return
    if not all(isinstance(weight, torch.Tensor) and weight.shape == (head_dim,) for weight in weights):
        return
    counts = [getattr(attention, name).out_features // head_dim for name in ("q_proj", "k_proj")]
    for offset in (0.0, 1.0):
        rows = [offset + w.detach().float().expand(n, -1) for w, n in zip(weights, counts, strict=True)]  # type: ignore[union-attr]
        yield HeadNorm(torch.cat(rows), torch.tensor(eps, device=rows[0].device))

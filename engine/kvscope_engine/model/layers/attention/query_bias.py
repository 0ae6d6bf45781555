"""Attention with a bias per query for each distance to the key (Inkling).

transformers computes the biases for every pair of tokens of one sequence. Here each query gets its row of biases by
distance (`use_distance_bias`), which works for any batch, and `attend_with_bias` adds the biases with torch operations
on any device, request by request. `eager_check` verifies the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from kvscope_engine.model.layers.attention_interface import uses_interface
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.kv_gather import gather_kv

_MAX_SCORES: Final = 1 << 24  # held at once: 64 MiB in float32
_ATTRIBUTE: Final = "kvscope_tells_by_distance"


@dataclass(frozen=True, slots=True, eq=False)
class QueryBias:
    """Biases that are added to the attention scores of queries, in any floating-point dtype."""

    by_distance: torch.Tensor
    """Shape (T, Hq, distances): element d is added to the score of the key d tokens before the query; keys further back
    get no bias.
    """
    sinks: torch.Tensor | None = None
    """Shape (T, Hq): score of an additional key whose value is 0."""

    def slice_queries(self, start: int, end: int) -> QueryBias:
        return QueryBias(self.by_distance[start:end], None if self.sinks is None else self.sinks[start:end])


def bias_of(kwargs: dict[str, Any]) -> QueryBias | None:
    """Return the bias in the keywords of an attention call; None if the call passes no bias.

    Keywords: `position_bias` (1, Hq, T, distances) and, optionally, `sinks` (1, Hq, T, 1).
    """
    bias, sinks = kwargs.get("position_bias"), kwargs.get("sinks")
    if bias is None:
        return None
    return QueryBias(bias[0].transpose(0, 1), None if sinks is None else sinks[0, :, :, 0].transpose(0, 1))


def has_distance_bias(attention: nn.Module) -> bool:
    """Whether `use_distance_bias` changed the module `attention`, so that its bias is supported."""
    return getattr(attention, _ATTRIBUTE, False)


def use_distance_bias(module: nn.Module, attention_name: str) -> None:
    """Make attention modules in `module` pass their bias by distance (`QueryBias`) instead of as a matrix.

    This applies while the model's attention implementation is `attention_name`.
    """
    for submodule in module.modules():
        for child in (
            submodule.children() if uses_interface(type(submodule)) and not has_distance_bias(submodule) else ()
        ):
            if isinstance(getattr(child, "rel_extent", None), int) and isinstance(
                getattr(child, "proj", None), nn.Parameter
            ):
                _replace_bias_forward(submodule, child, attention_name)


def _replace_bias_forward(attention: Any, bias_module: Any, attention_name: str) -> None:
    original_forward = bias_module.forward

    def forward(relative_states: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
        is_ours = attention.config._attn_implementation == attention_name
        bias: torch.Tensor = (
            (relative_states @ bias_module.proj).transpose(1, 2)
            if is_ours
            else original_forward(relative_states, *positions)
        )
        return bias

    bias_module.forward = forward
    setattr(attention, _ATTRIBUTE, True)


def attend_with_bias(args: AttentionArgs, bias: QueryBias, num_tokens: int) -> torch.Tensor:
    """Compute attention of the last queries of one request, (queries, Hq, D) -> (queries, Hq, Dv).

    The request has `num_tokens`; its block table is the only row of `args.block_tables`.
    """
    num_queries, num_heads, _ = args.query.shape
    position = num_tokens - num_queries
    step = max(1, _MAX_SCORES // (num_heads * num_tokens))
    outputs = []
    for start in range(0, num_queries, step):
        end = min(start + step, num_queries)
        piece_args = args._replace(query=args.query[start:end])
        outputs.append(_attend(piece_args, bias.slice_queries(start, end), position + start))
    return torch.cat(outputs)


def _attend(args: AttentionArgs, bias: QueryBias, position: int) -> torch.Tensor:
    """Compute attention in float32 for queries whose first has position `position`."""
    query, device = args.query, args.query.device
    end, num_kv_heads = position + len(query), args.k_cache.shape[2]
    first, last = args.first_seen(np.array([position])), np.array([end])
    kv = gather_kv(args.cache, args.block_tables, first, last, query.dtype)
    keys, values = (tensor[0].float().permute(1, 0, 2) for tensor in (kv.keys, kv.values))
    rows = query.float().permute(1, 0, 2).reshape(num_kv_heads, -1, query.shape[2]) * args.scale
    scores = torch.matmul(rows, keys.transpose(1, 2)).view(query.shape[1], len(query), -1)
    key_positions = torch.arange(int(first[0]), end, device=device)
    distance = torch.arange(position, end, device=device)[:, None] - key_positions
    by_distance = bias.by_distance.float().transpose(0, 1)
    extent = by_distance.shape[2]
    added_scores = by_distance.gather(2, distance.clamp(0, extent - 1).expand_as(scores))
    scores = (scores + added_scores.masked_fill_(distance >= extent, 0)).masked_fill_(distance < 0, float("-inf"))
    if args.sliding_window is not None:
        scores = scores.masked_fill_(distance >= args.sliding_window, float("-inf"))
    if bias.sinks is not None:
        scores = torch.cat([scores, bias.sinks.float().T[:, :, None]], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    out = torch.matmul(weights.reshape(num_kv_heads, -1, keys.shape[1]), values)
    return out.view(query.shape[1], len(query), -1).transpose(0, 1).to(query.dtype)

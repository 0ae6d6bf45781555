"""A rank's share of a model, cut before anything is joined: a narrower model of the same kind, in place.

Query heads, KV heads and rows of the feed-forward block are shared out; embeddings, norms and the head are on every
rank. The output projections keep their share of columns, so what they give is one part of a sum over all ranks
(`reduce`). Until the sum is put in, the narrow model is whole by itself, and is proven and joined as any other.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.ranks.rank import Rank, divides
from kvscope_telemetry.errors import BadInput

MAX_TOLD: Final = 64
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def check_divides(count: int, num_query_heads: int, num_kv_heads: int, intermediate: int, name: str) -> None:
    """Raise BadInput, with the numbers of ranks that are accepted, for a model that `count` does not divide."""
    if divides(count, num_query_heads, num_kv_heads, intermediate):
        return
    sizes = num_query_heads, num_kv_heads, intermediate
    accepted = ", ".join(str(other) for other in range(1, MAX_TOLD + 1) if divides(other, *sizes))
    raise BadInput(
        f"tensor_parallel_size={count} is not accepted for model {name!r}: its {num_query_heads} query heads,"
        f" {num_kv_heads} KV heads and {intermediate} rows of the feed-forward block cannot be shared out evenly;"
        f" {accepted} can be"
    )


def shard_model(module: nn.Module, rank: Rank, name: str) -> None:
    """Cut every layer, in place; what is not of this rank is let go.

    Raises BadInput for layers of another kind than Llama's, and for sizes that the number of ranks does not divide.
    """
    if rank.is_alone:
        return
    attentions = [part for part in module.modules() if _has(part, _ATTENTION)]
    mlps = [part for part in module.modules() if _has(part, _MLP)]
    num_layers = int(module.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    strange = [part for part in attentions if _own_tensors(part)]
    if strange or not len(attentions) == len(mlps) == num_layers:
        raise _not_this_kind(rank, name)
    with torch.no_grad():
        for attention, mlp in zip(attentions, mlps, strict=True):
            _shard_attention(attention, mlp, rank, name)
            _shard_mlp(mlp, rank)


def check_fused(num_joined: int, num_layers: int, rank: Rank, name: str) -> None:
    """Raise BadInput unless all layers were joined: what ranks add up is known of those alone."""
    if not rank.is_alone and num_joined != num_layers:
        raise _not_this_kind(rank, name)


def _not_this_kind(rank: Rank, name: str) -> BadInput:
    return BadInput(
        f"tensor_parallel_size={rank.count} is not accepted for model {name!r}: its layers are not of Llama's kind"
        " (attention of q, k, v and o, a gated feed-forward block, a norm before each), which alone are shared out"
    )


def _shard_attention(attention: Any, mlp: Any, rank: Rank, name: str) -> None:
    head_dim = int(attention.head_dim)
    num_query, num_kv = (getattr(attention, key).out_features // head_dim for key in ("q_proj", "k_proj"))
    check_divides(rank.count, num_query, num_kv, mlp.gate_proj.out_features, name)
    kv = rank.kv_heads(num_kv)
    query_rows, kv_rows = rank.part(num_query * head_dim), slice(kv.start * head_dim, kv.stop * head_dim)
    attention.q_proj = _rows(attention.q_proj, query_rows)
    attention.k_proj = _rows(attention.k_proj, kv_rows)
    attention.v_proj = _rows(attention.v_proj, kv_rows)
    attention.o_proj = _columns(attention.o_proj, query_rows, rank)
    attention.num_key_value_groups = (num_query // rank.count) // (kv.stop - kv.start)


def _shard_mlp(mlp: Any, rank: Rank) -> None:
    rows = rank.part(mlp.gate_proj.out_features)
    mlp.gate_proj = _rows(mlp.gate_proj, rows)
    mlp.up_proj = _rows(mlp.up_proj, rows)
    mlp.down_proj = _columns(mlp.down_proj, rows, rank)


def _rows(linear: nn.Linear, rows: slice) -> nn.Linear:
    return _linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _columns(linear: nn.Linear, columns: slice, rank: Rank) -> nn.Linear:
    """The bias is added once: by rank 0."""
    return _linear(linear.weight[:, columns], linear.bias if rank.index == 0 else None)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """With copies, so that the whole weight can go: of a mapped file only what is copied is ever read."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made.eval()


def _has(part: nn.Module, names: tuple[str, ...]) -> bool:
    return all(type(getattr(part, name, None)) is nn.Linear for name in names)


def _own_tensors(part: nn.Module) -> bool:
    """Such as sinks, one a head."""
    return any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False))

"""A rank's shard of a model for tensor parallelism: a narrower model of the same architecture, created in place.

Must run before layers are fused. Query heads, KV heads and rows of the feed-forward block are sharded; embeddings,
norms and the head are replicated. Output projections have a shard of columns, so their results are partial sums over
all ranks (`all_reduce`). Until the all-reduce is inserted, the narrow model is a complete model, and is checked and
fused like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.distributed.rank import Rank, divides
from kvscope_telemetry.errors import BadInput

MAX_SUGGESTED_RANKS: Final = 64
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LinearSharding:
    """How a linear layer's weight is sharded among ranks."""

    dim: int
    """Sharded dimension of the weight: 0 for rows (outputs), 1 for columns (inputs)."""
    size: int
    """Size of the sharded dimension in the whole model."""
    num_kv_heads: int = 0
    """Number of KV heads of the whole model if the layer computes keys or values; 0 for other layers. With
    fewer KV heads than ranks, several ranks have the same KV head.
    """

    def part(self, rank: Rank) -> slice:
        if not self.num_kv_heads:
            return rank.part(self.size)
        width, heads = self.size // self.num_kv_heads, rank.kv_heads(self.num_kv_heads)
        return slice(heads.start * width, heads.stop * width)


def check_divides(count: int, num_query_heads: int, num_kv_heads: int, intermediate: int, name: str) -> None:
    """Raise BadInput, listing the accepted numbers of ranks, if `count` does not divide the model's sizes."""
    if divides(count, num_query_heads, num_kv_heads, intermediate):
        return
    sizes = num_query_heads, num_kv_heads, intermediate
    accepted = ", ".join(str(other) for other in range(1, MAX_SUGGESTED_RANKS + 1) if divides(other, *sizes))
    raise BadInput(
        f"tensor_parallel_size={count} is not accepted for model {name!r}: its {num_query_heads} query heads, "
        f"{num_kv_heads} KV heads and {intermediate} rows of the feed-forward block cannot be divided evenly; "
        f"accepted are {accepted}"
    )


def shard_model(module: nn.Module, rank: Rank, name: str) -> Mapping[str, LinearSharding]:
    """Shard every layer in place and free the weights of other ranks. Returns the sharding by name of the linear layer.

    Raises:
        BadInput: Layers do not have Llama's structure, or the number of ranks does not divide the sizes.
    """
    if rank.is_alone:
        return {}
    parts = dict(module.named_modules())
    attentions = {key: part for key, part in parts.items() if _has(part, _ATTENTION)}
    mlps = {key: part for key, part in parts.items() if _has(part, _MLP)}
    num_layers = int(module.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    unsupported = [part for part in attentions.values() if _own_tensors(part)]
    unsupported += [part for part in parts.values() if _has_experts(part)]
    if unsupported or not len(attentions) == len(mlps) == num_layers:
        raise _unsupported_layers_error(rank, name)
    shardings: dict[str, LinearSharding] = {}
    with torch.no_grad():
        for (key, attention), (mlp_key, mlp) in zip(attentions.items(), mlps.items(), strict=True):
            attention_shardings = _attention_shardings(attention, mlp, rank, name)
            _shard(attention, attention_shardings, rank)
            mlp_shardings = _mlp_shardings(mlp)
            _shard(mlp, mlp_shardings, rank)
            attention.num_key_value_groups = attention.q_proj.out_features // attention.k_proj.out_features
            shardings |= {f"{key}.{part}": sharding for part, sharding in attention_shardings.items()}
            shardings |= {f"{mlp_key}.{part}": sharding for part, sharding in mlp_shardings.items()}
    return shardings


def check_fused(num_fused: int, num_layers: int, rank: Rank, name: str) -> None:
    """Raise BadInput unless all layers were fused, because the all-reduce is inserted in fused layers only."""
    if not rank.is_alone and num_fused != num_layers:
        raise _unsupported_layers_error(rank, name)


def _unsupported_layers_error(rank: Rank, name: str) -> BadInput:
    return BadInput(
        f"tensor_parallel_size={rank.count} is not accepted for model {name!r}: only layers like those of Llama can "
        "be split (attention with q, k, v and o, a gated feed-forward block, and a norm before each)"
    )


def _attention_shardings(attention: Any, mlp: Any, rank: Rank, name: str) -> dict[str, LinearSharding]:
    head_dim = int(attention.head_dim)
    num_query, num_kv = (getattr(attention, key).out_features // head_dim for key in ("q_proj", "k_proj"))
    check_divides(rank.count, num_query, num_kv, mlp.gate_proj.out_features, name)
    kv = LinearSharding(0, num_kv * head_dim, num_kv)
    query_rows = num_query * head_dim
    return {
        "q_proj": LinearSharding(0, query_rows),
        "k_proj": kv,
        "v_proj": kv,
        "o_proj": LinearSharding(1, query_rows),
    }


def _mlp_shardings(mlp: Any) -> dict[str, LinearSharding]:
    rows = mlp.gate_proj.out_features
    return {
        "gate_proj": LinearSharding(0, rows),
        "up_proj": LinearSharding(0, rows),
        "down_proj": LinearSharding(1, rows),
    }


def _shard(parent: nn.Module, shardings: dict[str, LinearSharding], rank: Rank) -> None:
    for name, sharding in shardings.items():
        linear, part = getattr(parent, name), sharding.part(rank)
        if sharding.dim == 0:
            shard = _linear(linear.weight[part], None if linear.bias is None else linear.bias[part])
        else:
            # The bias is added once, by rank 0.
            shard = _linear(linear.weight[:, part], linear.bias if rank.index == 0 else None)
        setattr(parent, name, shard)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Create a layer with copies of `weight` and `bias`, so that the whole weight can be freed.

    If the weight is mapped from a file, only the copied part is read.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear.eval()


def _has(part: nn.Module, names: tuple[str, ...]) -> bool:
    return all(type(getattr(part, name, None)) is nn.Linear for name in names)


def _has_experts(part: nn.Module) -> bool:
    """Whether one parameter holds the weights of several experts."""
    return any(parameter.dim() == 3 for parameter in part.parameters(recurse=False))


def _own_tensors(part: nn.Module) -> bool:
    """Whether the module has direct tensors (not in submodules), such as attention sinks per head."""
    return any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False))

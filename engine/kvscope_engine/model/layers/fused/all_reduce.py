"""All-reduce after the two output projections (attention and MLP) of each fused layer, for tensor parallelism.

Decides where the all-reduce is inserted. `distributed.rank_group` owns the communication between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.fused.fused_layer import FusedLayer

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Function that sums a rank's partial result over all ranks and returns the sum. It may work in place."""


class ReducedLinear(nn.Module):
    """Row-parallel linear layer: computes this rank's partial result with `shard` and sums it over all ranks."""

    fuses_add: Final = False

    def __init__(self, shard: nn.Module, all_reduce: AllReduce) -> None:
        super().__init__()
        self.shard = shard
        self._all_reduce = all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features of the shard) to (..., out_features). The result is the same on all ranks."""
        return self._all_reduce(self.shard(x))

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return `forward(x) + other`; `other` is complete and equal on every rank."""
        return self.forward(x) + other


def install_all_reduce(module: nn.Module, all_reduce: AllReduce) -> None:
    """Insert the all-reduce into every fused layer, in place.

    Afterwards a forward pass is a collective operation: all ranks must run it together.
    """
    for layer in _fused_layers(module):
        attention: Any = layer.attention
        mlp: Any = layer.mlp
        attention.o = ReducedLinear(attention.o, all_reduce)
        mlp.down = ReducedLinear(mlp.down, all_reduce)


def keep_residual_in_float32(module: nn.Module, keeps_float32: bool) -> None:
    """Set `keeps_float32` of every fused layer to the value that all ranks agreed on.

    Ranks must agree on the value, because each rank has checked only its own shard.
    """
    for layer in _fused_layers(module):
        layer.keeps_float32 = keeps_float32


def _fused_layers(module: nn.Module) -> Iterator[FusedLayer]:
    for submodule in module.modules():
        layer = getattr(submodule, "kvscope_fused", None)
        if isinstance(layer, FusedLayer):
            yield layer

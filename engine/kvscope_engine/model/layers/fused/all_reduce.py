"""The sum over all ranks, behind the two output projections of each joined layer.

Owns where it is put in; how ranks reach each other is `distributed.rank_group`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.fused.fused_layer import FusedLayer

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Takes a rank's part of a sum, gives the sum; may write it where the part was."""


class ReducedLinear(nn.Module):
    """A rank's share of a linear layer, and the sum of all shares. Stands where the share stood."""

    adds_as_it_multiplies: Final = False

    def __init__(self, share: nn.Module, all_reduce: AllReduce) -> None:
        super().__init__()
        self.share = share
        self._all_reduce = all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., share of in_features) -> (..., out_features), the same on all ranks."""
        return self._all_reduce(self.share(x))

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, plus `other`, which every rank has whole."""
        return self.forward(x) + other


def reduce_behind_layers(module: nn.Module, all_reduce: AllReduce) -> None:
    """Put the sum into every joined layer, in place. Each forward pass is from now on one of all ranks together."""
    for layer in _fused_layers(module):
        attention: Any = layer.attention
        mlp: Any = layer.mlp
        attention.o = ReducedLinear(attention.o, all_reduce)
        mlp.down = ReducedLinear(mlp.down, all_reduce)


def keep_residual_in_float32(module: nn.Module, keeps: bool) -> None:
    """As all ranks agreed: each proved it of its own share alone."""
    for layer in _fused_layers(module):
        layer.keeps_float32 = keeps


def _fused_layers(module: nn.Module) -> Iterator[FusedLayer]:
    for part in module.modules():
        layer = getattr(part, "kvscope_fused", None)
        if isinstance(layer, FusedLayer):
            yield layer

"""A gated feed-forward block in few operations: one product for gate and up. `fuse` proves that a module is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvscope_engine.model.joined.packed_linear import fast_linear


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, mlp: nn.Module, packed: bool) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        self.size = gate.out_features
        self.gate_up = fast_linear([gate, up], packed)
        self.down = fast_linear([down], packed)
        self.act_fn: Any = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        return self.down(self.activate(x))  # type: ignore[no-any-return]

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., intermediate), before the last product."""
        both = self.gate_up(x)
        activated: torch.Tensor = self.act_fn(both[..., : self.size])
        return activated.mul_(both[..., self.size :])


def mlp_candidate(mlp: nn.Module, packed: bool) -> FusedMLP | None:
    """What `mlp` may be, if it is made of the parts known here."""
    projections = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(projection) is nn.Linear for projection in projections) or not hasattr(mlp, "act_fn"):
        return None
    return FusedMLP(mlp, packed)

"""Gated feed-forward block in few operations, with one matmul for gate and up. `verification.fuse` compares its
results with those of the original block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.layers.fused.packed_linear import fast_linear
from kvscope_engine.model.tensor_agreement import is_close
from kvscope_kernels import ops_for
from kvscope_kernels.gated_activation import ACTIVATIONS


class FusedMLP(nn.Module):
    """Gated feed-forward block: down(act(gate(x)) * up(x))."""

    def __init__(self, mlp: nn.Module, packed: bool) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        self.size = gate.out_features
        self.gate_up = fast_linear([gate, up], packed)
        self.down = fast_linear([down], packed)
        self.act_fn: Any = mlp.act_fn
        self._ops = ops_for(gate.weight.device.type)
        self.activation_kind = activation_kind_of(mlp.act_fn, gate.weight.device)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(x))  # type: ignore[no-any-return]

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the intermediate activations (..., intermediate) of x (..., hidden), before the down projection."""
        gate_and_up = self.gate_up(x)
        if self.activation_kind is not None:
            return self._ops.gated_activation(gate_and_up, self.activation_kind)
        activated: torch.Tensor = self.act_fn(gate_and_up[..., : self.size])
        return activated.mul_(gate_and_up[..., self.size :])


def mlp_candidate(mlp: nn.Module, packed: bool) -> FusedMLP | None:
    """Return `mlp` as a `FusedMLP`; None if it does not have the expected submodules."""
    projections = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(projection) is nn.Linear for projection in projections) or not hasattr(mlp, "act_fn"):
        return None
    return FusedMLP(mlp, packed)


def activation_kind_of(act_fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> int | None:
    """Return the kernels' identifier of the activation function whose outputs equal those of `act_fn`; None if
    the kernels have no such function.
    """
    probe = torch.linspace(-12.0, 12.0, 481, device=device)
    try:
        outputs = act_fn(probe.clone())
    except (RuntimeError, TypeError, ValueError):
        return None
    return next(
        (kind for kind, kernel_activation in ACTIVATIONS.items() if is_close(outputs, kernel_activation(probe), 1e-6)),
        None,
    )

"""What the experts of one layer are: their weights, and what stands between the two products."""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.gated_activation import GELU_TANH, SILU

RELU_SQUARED: Final = 2
"""Beside the kinds of `gated_activation`; without a gate."""


class Gate(NamedTuple):
    """act(min(gate, limit)) * (up cut to [-limit, limit] + shift); of `RELU_SQUARED` max(up, 0)^2 alone.

    gpt-oss has kind SILU with alpha 1.702, limit 7 and shift 1 (its model card, 2025).
    """

    kind: int = SILU
    alpha: float = 1.0
    """SILU is gate * sigmoid(alpha * gate)."""
    limit: float = math.inf
    shift: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate beside what it lets through."""
        return self.kind != RELU_SQUARED

    def of(self, both: Tensor) -> Tensor:
        """(..., 2 * size), the gate first, to (..., size); without a gate (..., size) to the same."""
        if not self.is_gated:
            return both.relu().square()
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.kind == GELU_TANH:
            return gelu(gate, approximate="tanh") * (up + self.shift)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


class ExpertWeights(NamedTuple):
    """Of all experts of a layer.

    up         (experts, 2 * size, hidden), the gate's rows first; (experts, size, hidden) without a gate
    down       (experts, hidden, size)
    up_bias    (experts, rows of up), or None
    down_bias  (experts, hidden), or None

    Floating, contiguous, of one dtype and device.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate: Gate

    def check(self) -> None:
        """Raises ValueError for what the operation does not take."""
        num_rows = 1 + self.gate.is_gated
        if self.gate.kind not in (SILU, GELU_TANH, RELU_SQUARED):
            require(False, "kind", self.gate.kind, "SILU, GELU_TANH or RELU_SQUARED")
        if self.down.dim() != 3 or self.down.dtype not in FLOAT_DTYPES or not self.down.is_contiguous():
            require(False, "down", self.down, "(experts, hidden, size), floating, contiguous,")
        num_experts, hidden, size = self.down.shape
        for name, found, shape in (
            ("up", self.up, (num_experts, num_rows * size, hidden)),
            ("up_bias", self.up_bias, (num_experts, num_rows * size)),
            ("down_bias", self.down_bias, (num_experts, hidden)),
        ):
            if found is None and name != "up":
                continue
            if found is None or found.shape != shape or found.dtype != self.down.dtype or not found.is_contiguous():
                require(False, name, found, f"{shape} {self.down.dtype}, contiguous,")

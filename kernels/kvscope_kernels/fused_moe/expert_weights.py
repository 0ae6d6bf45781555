"""Weights of the experts of one layer, and the activation between the two linear layers of an expert."""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.gated_activation import GELU_TANH, SILU

RELU_SQUARED: Final = 2
"""Kind of an activation without a gate, in addition to the kinds of `gated_activation`."""
FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the eight 3-bit codes of MXFP4, in order."""
GROUP: Final = 32
"""Number of inputs in an MXFP4 weight that share a power of two."""
_BYTES: Final = GROUP // 2
_MAX_POWER: Final = 128
"""Maximum stored power, so that the factor in the kernel is finite in float32."""


class Gate(NamedTuple):
    """Activation act(min(gate, limit)) * (up clamped to [-limit, limit] + shift); for `RELU_SQUARED` just max(up, 0)^2.

    gpt-oss uses kind SILU with alpha 1.702, limit 7 and shift 1 (its model card, 2025).
    """

    kind: int = SILU
    alpha: float = 1.0
    """Factor in SILU: gate * sigmoid(alpha * gate)."""
    limit: float = math.inf
    shift: float = 0.0

    @property
    def is_gated(self) -> bool:
        return self.kind != RELU_SQUARED

    def apply(self, both: Tensor) -> Tensor:
        """Apply the activation: (..., 2 * size), with the gate first, -> (..., size). Without a gate: (...,
        size) -> (..., size).
        """
        if not self.is_gated:
            return both.relu().square()
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.kind == GELU_TANH:
            return gelu(gate, approximate="tanh") * (up + self.shift)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


class Mxfp4Weight(NamedTuple):
    """Weights in MXFP4: weight[e, n, k] = number(code) * 2^(powers[e, n, k // 32] - 127).

    codes: (experts, outputs, inputs / 2) uint8. For each 32 inputs, byte i has input i in its low half, and input i +
    16 in its high half. A code is a sign bit and an index into `FP4`.

    powers: (experts, outputs, inputs / 32) uint8, 1 to 128.

    Source: Open Compute Project, Microscaling formats, 1.0, 2023.
    """

    codes: Tensor
    powers: Tensor

    def widened(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight of one expert, (outputs, inputs)."""
        codes = self.codes[expert].view(self.codes.shape[1], -1, _BYTES)
        codes = torch.cat((codes & 15, codes >> 4), 2)
        numbers = torch.tensor(FP4, device=codes.device)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
        return torch.ldexp(numbers, self.powers[expert].int()[..., None] - 127).flatten(1).to(dtype)


def to_mxfp4(weight: Tensor) -> Mxfp4Weight | None:
    """Convert (experts, outputs, inputs) to MXFP4. Returns None unless MXFP4 represents every number exactly.

    The weights of a checkpoint in MXFP4 are represented exactly.
    """
    num_experts, outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    codes = weight.new_empty(num_experts, outputs, inputs // 2, dtype=torch.uint8)
    powers = weight.new_empty(num_experts, outputs, inputs // GROUP, dtype=torch.uint8)
    for expert, wide in enumerate(weight):
        codes_and_powers = _mxfp4_codes(wide.float().reshape(outputs, -1, GROUP))
        if codes_and_powers is None:
            return None
        codes[expert], powers[expert] = codes_and_powers
    return Mxfp4Weight(codes, powers)


def _mxfp4_codes(groups: Tensor) -> tuple[Tensor, Tensor] | None:
    """Convert groups (outputs, groups, 32) to codes and powers, or return None if the conversion is not exact.

    The largest number of a group becomes 4 or 6, which keeps the conversion exact.
    """
    powers = torch.frexp(groups.abs().amax(2)).exponent - 3 + 127
    powers = powers.masked_fill(groups.abs().amax(2) == 0, 127)
    numbers = torch.ldexp(groups, 127 - powers[..., None])
    table = torch.tensor(FP4, device=groups.device)
    indices = torch.bucketize(numbers.abs(), table).clamp(max=len(FP4) - 1)
    if not torch.equal(table[indices], numbers.abs()) or int(powers.min()) < 1 or int(powers.max()) > _MAX_POWER:
        return None
    codes = (indices + 8 * (numbers < 0)).to(torch.uint8)
    return (codes[..., :_BYTES] | codes[..., _BYTES:] << 4).flatten(1), powers.to(torch.uint8)


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer.

    Tensors are floating-point, contiguous, of one dtype and device; `up` and `down` may both be 4-bit.

    Args:
        up: (experts, 2 * size, hidden), the gate's rows first; (experts, size, hidden) without a gate.
        down: (experts, hidden, size).
        up_bias: (experts, rows of up), or None.
        down_bias: (experts, hidden), or None.
        gate: Activation between `up` and `down`.
    """

    up: Tensor | Mxfp4Weight
    down: Tensor | Mxfp4Weight
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate: Gate

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, hidden, size)."""
        if isinstance(self.down, Mxfp4Weight):
            num_experts, hidden, num_bytes = self.down.codes.shape
            return num_experts, hidden, 2 * num_bytes
        num_experts, hidden, size = self.down.shape
        return num_experts, hidden, size

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights; None for 4-bit weights, which support all dtypes of activations."""
        return None if isinstance(self.down, Mxfp4Weight) else self.down.dtype

    def check(self) -> None:
        """Raise ValueError if `mix_experts` does not support the weights."""
        if self.gate.kind not in (SILU, GELU_TANH, RELU_SQUARED):
            require(False, "kind", self.gate.kind, "SILU, GELU_TANH or RELU_SQUARED")
        if isinstance(self.down, Tensor) and (self.down.dim() != 3 or self.down.dtype not in FLOAT_DTYPES):
            require(False, "down", self.down, "(experts, hidden, size), floating,")
        num_experts, hidden, size = self.shape
        num_rows = size * (1 + self.gate.is_gated)
        for name, weight, shape in (
            ("up", self.up, (num_experts, num_rows, hidden)),
            ("down", self.down, (num_experts, hidden, size)),
        ):
            if isinstance(weight, Mxfp4Weight):
                _check(f"{name}'s codes", weight.codes, (*shape[:2], shape[2] // 2), torch.uint8)
                _check(f"{name}'s powers", weight.powers, (*shape[:2], shape[2] // GROUP), torch.uint8)
            else:
                _check(name, weight, shape, self.dtype)
        for name, bias, num_outputs in (("up_bias", self.up_bias, num_rows), ("down_bias", self.down_bias, hidden)):
            if bias is not None:
                _check(name, bias, (num_experts, num_outputs), self.dtype or bias.dtype)


def _check(name: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    if found.shape != shape or found.dtype != dtype or not found.is_contiguous():
        require(False, name, found, f"{shape} {dtype}, contiguous,")

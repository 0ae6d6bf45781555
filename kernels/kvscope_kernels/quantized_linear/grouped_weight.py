"""Weights as integers of 4 or 8 bits with a scale and a minimum (`low`) for each group of inputs.

Defines the format of such weights, creates them from floating-point weights, and concatenates them. Independent of the
memory layouts of kernels and of file formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.checks import require

CHUNK: Final = 32
"""Number of inputs of which every group size is a multiple."""
_RANGE_FACTORS: Final = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors by which the range of a group is shrunk on trial; the one with the smallest error is used.

Numbers outside a smaller range are clipped, while those inside are represented more finely.
"""
_ELEMENTS_PER_PART: Final = 1 << 22


@dataclass(frozen=True)
class GroupedWeight:
    """Quantized weight: weight[n, k] = scale[n, g] * codes[n, k] + low[n, g], in float32, with g = k // group."""

    codes: Tensor
    """(outputs, inputs) uint8, each below 2^bits."""
    scale: Tensor
    """(outputs, groups) float16, or float32 if float16 cannot represent it or `low`; groups = ceil(inputs / group)."""
    low: Tensor
    """Minimum of each group; shape and dtype as `scale`."""
    bits: int
    group: int
    """Number of inputs per group, a multiple of CHUNK. The last group of a row may be shorter."""

    def __post_init__(self) -> None:
        codes, groups = self.codes, -(-self.codes.shape[-1] // self.group)
        if codes.dim() != 2 or not codes.numel() or codes.dtype != torch.uint8:
            require(False, "codes", codes, "(outputs, inputs) uint8, neither of them 0,")
        if self.bits not in (4, 8) or self.group < CHUNK or self.group % CHUNK:
            require(False, "bits and group", (self.bits, self.group), f"4 or 8, and a multiple of {CHUNK}")
        for name, facts in (("scale", self.scale), ("low", self.low)):
            if facts.shape != (len(codes), groups) or facts.dtype not in (torch.float16, torch.float32):
                require(False, name, facts, f"{(len(codes), groups)} float16 or float32")

    def widened(self) -> Tensor:
        """Return the dequantized weight, (outputs, inputs) float32."""
        scale, low = (x.float().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]] for x in self.scale_and_low)
        return scale * self.codes + low

    @property
    def scale_and_low(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.low

    def rows(self, order: Tensor) -> GroupedWeight:
        """Return the weight with only the outputs in `order`, in that order."""
        return GroupedWeight(self.codes[order], self.scale[order], self.low[order], self.bits, self.group)


def grouped(codes: Tensor, scale: Tensor, low: Tensor, bits: int, group: int) -> GroupedWeight:
    """Create a weight. `scale` and `low`, float32, are stored in float16 if float16 represents them exactly."""
    halves = scale.half(), low.half()
    is_exact = torch.equal(halves[0].float(), scale) and torch.equal(halves[1].float(), low)
    return GroupedWeight(codes, *(halves if is_exact else (scale, low)), bits, group)


def concatenated(weights: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Concatenate the outputs of weights. Returns None if they have different bits, groups or inputs."""
    first = weights[0]
    if len({(weight.bits, weight.group, weight.codes.shape[1]) for weight in weights}) > 1:
        return None
    codes = torch.cat([weight.codes for weight in weights])
    scale, low = (torch.cat([weight.scale_and_low[i].float() for weight in weights]) for i in range(2))
    return grouped(codes, scale, low, first.bits, first.group)


def rounded(weight: Tensor, bits: int = 4, group: int = CHUNK) -> GroupedWeight:
    """Round `weight` (outputs, inputs) to the nearest of 2^bits evenly spaced numbers in each group's range.

    Raises ValueError for a weight that is not two-dimensional, is empty or is not finite.
    """
    require(weight.dim() == 2 and weight.numel() > 0, "weight", weight, "(outputs, inputs), neither of them 0,")
    parts = [_round_rows(rows.float(), bits, group) for rows in split_rows(weight.detach())]
    codes, scale, low = (torch.cat([part[i] for part in parts]) for i in range(3))
    if not bool(torch.isfinite(scale).all() & torch.isfinite(low).all()):
        require(False, "weight", weight, "finite numbers that float16 holds")
    return GroupedWeight(codes, scale, low, bits, group)


def split_rows(weight: Tensor) -> tuple[Tensor, ...]:
    """Split a weight along its rows into tensors that are small enough to be converted to float32."""
    return torch.split(weight, max(1, _ELEMENTS_PER_PART // weight.shape[1]))


def _round_rows(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = rows.shape[1]
    grouped_rows = pad(rows[:, None], (0, -inputs % group), mode="replicate").view(len(rows), -1, group)
    max_code = float(2**bits - 1)
    lowest, highest = grouped_rows.aminmax(dim=-1, keepdim=True)
    best: tuple[Tensor, ...] = ()
    candidate: tuple[Tensor, ...]
    for shrink in _RANGE_FACTORS if bits == 4 else _RANGE_FACTORS[:1]:
        candidate = _quantize_groups(grouped_rows, lowest * shrink, highest * shrink, max_code)
        if best:
            is_better = candidate[-1] < best[-1]
            candidate = tuple(torch.where(is_better, one, other) for one, other in zip(candidate, best, strict=True))
        best = candidate
    codes, scale, low = best[:3]
    return codes.flatten(1)[:, :inputs].to(torch.uint8), scale[..., 0].half(), low[..., 0].half()


def _quantize_groups(
    grouped_rows: Tensor, lowest: Tensor, highest: Tensor, max_code: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scale, low and the squared error per group, with scale and low rounded to float16."""
    low = lowest.half().float()
    scale = ((highest - lowest) / max_code).half().float()
    codes = ((grouped_rows - low) / torch.where(scale > 0, scale, 1.0)).round_().clamp_(0.0, max_code)
    return codes, scale, low, (scale * codes + low - grouped_rows).square_().sum(-1, keepdim=True)

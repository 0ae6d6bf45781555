"""Logarithmic axis: conversion from values to pixels, ticks and tick labels. Imports no Qt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_MARGIN_FACTOR = 1.6
_MIN_TICK_SPACING_PX = 60


@dataclass(frozen=True, slots=True)
class LogScale:
    """Axis from `low` at pixel `first` to `high` at pixel `last`. `low` and `high` must be above 0."""

    low: float
    high: float
    first: float
    last: float

    def position_of(self, value: float) -> float:
        return float(self.positions_of(np.array([value]))[0])

    def positions_of(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the pixel positions of `values`, in the same shape. All values must be above 0."""
        share = np.log(values / self.low) / math.log(self.high / self.low)
        pixels: npt.NDArray[np.float64] = self.first + share * (self.last - self.first)
        return pixels

    def ticks(self) -> list[float]:
        """Return powers of ten, far enough apart for their labels.

        If the range contains fewer than two powers, the multiples by 2 and 5 are included.
        """
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        powers = [10.0**exponent for exponent in range(first, last + 1)]
        if len(powers) < 2:
            finer = [factor * 10.0**exponent for exponent in range(first - 1, last + 1) for factor in (1, 2, 5)]
            return [value for value in finer if self.low <= value <= self.high]
        stride = max(1, math.ceil(len(powers) * _MIN_TICK_SPACING_PX / max(abs(self.last - self.first), 1)))
        return powers[::stride]


def bounds(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the ends of an axis for `values` with a margin, or (1, 10) if there are no values."""
    if not values.size:
        return 1.0, 10.0
    return float(values.min()) / _MARGIN_FACTOR, float(values.max()) * _MARGIN_FACTOR


def with_prefix(value: float, unit: str) -> str:
    """Format a value with an SI prefix and about three digits, for example `12.3 GB/s`."""
    if value < 1:
        return f"{value:.2g} {unit}"
    power = min(int(math.log10(value) / 3 + 1e-9), len(_PREFIXES) - 1)
    scaled = value / 1000.0**power
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f} {_PREFIXES[power]}{unit}"


def tick_text(value: float, unit: str) -> str:
    """Format a value with an SI prefix, without trailing zeros, for example `100 G`."""
    if value < 1:
        return f"{value:g}"
    power = min(int(math.log10(value) / 3 + 1e-9), len(_PREFIXES) - 1)
    return f"{value / 1000.0**power:g} {_PREFIXES[power]}{unit}".strip()

"""Histograms as a page of metrics has them: how many were at most so long, ever; and what was added between two pages.

A histogram gives bounds, not samples: no sample is ever made up here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.messages.telemetry import Histogram

MAX_BOUNDS: Final = 512
_LONGEST_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Cumulative:
    """`counts[i]` were at most `bounds_s[i]`; the last count is of all, and has no bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_buckets(cls, buckets: dict[float, float]) -> Cumulative | None:
        """Of upper bounds in seconds and how many were at most that; None for what is no histogram."""
        bounds = sorted(buckets)
        if len(bounds) < 2 or len(bounds) > MAX_BOUNDS or bounds[-1] != math.inf or not bounds[0] > 0:
            return None
        counts = [buckets[bound] for bound in bounds]
        if not all(map(math.isfinite, counts)) or any(a > b for a, b in pairwise(counts)) or counts[0] < 0:
            return None
        finite = tuple(bound for bound in bounds[:-1] if bound <= _LONGEST_S)
        return cls(finite, (*map(int, counts[: len(finite)]), int(counts[-1])))

    @property
    def total(self) -> int:
        """How many there were."""
        return self.counts[-1]

    def since(self, before: Cumulative | None, kind: str) -> Histogram | None:
        """What was added since `before`, an interval each; None where nothing was, or they cannot be compared."""
        if before is None or before.bounds_s != self.bounds_s:
            return None
        added = np.diff(np.array(self.counts) - np.array(before.counts), prepend=0)
        if not added.any() or added.min() < 0:
            return None
        bounds = np.rint(np.array(self.bounds_s) * 1e9).astype("<u8")
        return Histogram(kind=kind, bounds_ns=bounds.tobytes(), counts=added.astype("<u8").tobytes())

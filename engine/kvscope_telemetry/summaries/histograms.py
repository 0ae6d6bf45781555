"""Adds up latencies that were reported as histograms, and finds the bounds of a percentile.

Knows no engine and no clock. Bounds are those of whoever told them: a histogram with others begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.telemetry import Histogram, Reading

IntArray = npt.NDArray[np.int64]


class PercentileBounds(NamedTuple):
    """What is known of a percentile, in seconds: above `low`, at most `high`, which is infinite where there is no
    upper bound. NaN: nothing is known."""

    low: float
    high: float


UNKNOWN_RANGE = PercentileBounds(math.nan, math.nan)


@dataclass(slots=True)
class Buckets:
    """Counts between bounds, added up."""

    bounds_ns: IntArray
    counts: IntArray

    @classmethod
    def of(cls, histogram: Histogram) -> Buckets:
        """As it was told."""
        bounds, counts = (
            np.frombuffer(data, "<u8").astype(np.int64) for data in (histogram.bounds_ns, histogram.counts)
        )
        return cls(bounds, counts)

    @property
    def total(self) -> int:
        """How many latencies there were."""
        return int(self.counts.sum())

    def percentile(self, share: float) -> PercentileBounds:
        """Between which bounds the one lies that `share` (0 to 1) of all are below, or equal to."""
        total = self.total
        if not total:
            return UNKNOWN_RANGE
        place = int(np.searchsorted(np.cumsum(self.counts), share * total, "left"))
        place = min(place, self.counts.size - 1)
        low = float(self.bounds_ns[place - 1]) / 1e9 if place else 0.0
        high = float(self.bounds_ns[place]) / 1e9 if place < self.bounds_ns.size else math.inf
        return PercentileBounds(low, high)


def joined(readings: Iterable[Reading], kind: str) -> Buckets | None:
    """All of `kind`, as long as the bounds stay the newest's; None where nothing was told."""
    found: Buckets | None = None
    for reading in readings:
        for histogram in reading.latencies:
            if histogram.kind != kind:
                continue
            buckets = Buckets.of(histogram)
            if found is not None and np.array_equal(found.bounds_ns, buckets.bounds_ns):
                found.counts = found.counts + buckets.counts
            else:
                found = buckets
    return found

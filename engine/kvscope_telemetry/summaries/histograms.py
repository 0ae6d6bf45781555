"""Adds up latency histograms, and finds the bounds of a percentile.

The bucket bounds are those of the reporting engine: a histogram with other bounds restarts the sum. Must not depend on
an engine or a clock.
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
    """Bounds of a percentile in seconds: it is above `low` and at most `high`, which may be infinite. Both are
    NaN if nothing is known.
    """

    low: float
    high: float


UNKNOWN_RANGE = PercentileBounds(math.nan, math.nan)


@dataclass(slots=True)
class Buckets:
    bounds_ns: IntArray
    counts: IntArray

    @classmethod
    def of(cls, histogram: Histogram) -> Buckets:
        bounds, counts = (
            np.frombuffer(data, "<u8").astype(np.int64) for data in (histogram.bounds_ns, histogram.counts)
        )
        return cls(bounds, counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def percentile(self, share: float) -> PercentileBounds:
        """Return bounds of the latency percentile at `share`, 0 to 1."""
        total = self.total
        if not total:
            return UNKNOWN_RANGE
        index = int(np.searchsorted(np.cumsum(self.counts), share * total, "left"))
        index = min(index, self.counts.size - 1)
        low = float(self.bounds_ns[index - 1]) / 1e9 if index else 0.0
        high = float(self.bounds_ns[index]) / 1e9 if index < self.bounds_ns.size else math.inf
        return PercentileBounds(low, high)


def sum_histograms(readings: Iterable[Reading], kind: str) -> Buckets | None:
    """Return the sum of the histograms of `kind` since the last change of bucket bounds; None if there are no
    histograms.
    """
    total: Buckets | None = None
    for reading in readings:
        for histogram in reading.latencies:
            if histogram.kind != kind:
                continue
            buckets = Buckets.of(histogram)
            if total is not None and np.array_equal(total.bounds_ns, buckets.bounds_ns):
                total.counts = total.counts + buckets.counts
            else:
                total = buckets
    return total

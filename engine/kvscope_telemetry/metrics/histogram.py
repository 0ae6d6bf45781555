"""Cumulative histograms with vLLM's bounds. Owns the bounds and the counts; must not depend on metric names or the
engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS: Final = (1.0, *(float(8 << power) for power in range(12)))
MAX_DECADES: Final = 12


def length_bounds(max_value: int) -> tuple[float, ...]:
    """Return histogram bounds for token counts: 1, 2, 5, 10, 20, 50, ... up to `max_value`. The only bound is 1
    if `max_value` is 0 (unknown).
    """
    bounds = (mantissa * 10.0**decade for decade in range(MAX_DECADES) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_value) or (1.0,)


class PrometheusHistogram:
    """A Prometheus histogram: counts of values up to each of `bounds` (ascending), the total count, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._edges = np.array(self.bounds)
        self._counts = np.zeros(len(self.bounds) + 1, np.int64)

    def add(self, value: float) -> None:
        """Count one value. A negative value counts as 0: a duration can be negative if one of its times is from
        another machine's clock.
        """
        value = max(value, 0.0)
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count each of `values`, shape (n,), which must not be negative."""
        if values.size:
            self._counts += np.bincount(self._edges.searchsorted(values), minlength=self._counts.size)
            self.sum += float(values.sum())

    def cumulative(self) -> list[int]:
        totals: list[int] = self._counts.cumsum().tolist()
        return totals

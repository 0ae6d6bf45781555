"""Bounded window of the newest latencies with their times, and percentiles over it. Imports no Qt."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_FRACTIONS: Final = np.array((0.50, 0.95))


def percentiles(values_ns: IntArray) -> tuple[float, float]:
    """Return the median and the 95th percentile in seconds; NaN without values."""
    if not values_ns.size:
        return np.nan, np.nan
    positions = _FRACTIONS * (values_ns.size - 1)
    below = positions.astype(np.int64)
    above = np.ceil(positions).astype(np.int64)
    ordered = np.partition(values_ns, np.concatenate((below, above)))  # np.percentile takes several times as long
    p50, p95 = (ordered[below] + (ordered[above] - ordered[below]) * (positions - below)).tolist()
    return p50 / 1e9, p95 / 1e9


class LatencyWindow:
    """Ring buffer of the newest `capacity` latencies in ns. Collects the values of the current bin separately."""

    def __init__(self, capacity: int) -> None:
        self._values = np.zeros(capacity, np.int64)
        self._times_ns = np.full(capacity, np.iinfo(np.int64).min)
        self._next_slot = 0
        self._bin_number = -1
        self._bin_values: list[IntArray] = []

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._times_ns.nbytes

    def add(self, values_ns: IntArray, time_ns: int, bin_number: int) -> tuple[int, float, float] | None:
        """Append values that were received at `time_ns`. Returns the result of `close_bin`."""
        closed_bin = self.close_bin(bin_number)
        if values_ns.size:
            self._bin_number = bin_number
            self._bin_values.append(values_ns)
            self._store(values_ns[-self._values.size :], time_ns)
        return closed_bin

    def close_bin(self, bin_number: int) -> tuple[int, float, float] | None:
        """Return (bin number, p50, p95), in seconds, of the current bin if it is older than `bin_number`, else None."""
        if not self._bin_values or bin_number <= self._bin_number:
            return None
        p50, p95 = percentiles(np.concatenate(self._bin_values))
        self._bin_values.clear()
        return self._bin_number, p50, p95

    def between(self, since_ns: int, until_ns: int) -> tuple[float, float]:
        """Return p50 and p95 in seconds of the retained values that were received between two times."""
        return percentiles(self._values[(self._times_ns >= since_ns) & (self._times_ns <= until_ns)])

    def _store(self, values_ns: IntArray, time_ns: int) -> None:
        slots = (self._next_slot + np.arange(values_ns.size)) % self._values.size
        self._values[slots] = values_ns
        self._times_ns[slots] = time_ns
        self._next_slot = int(slots[-1] + 1) % self._values.size

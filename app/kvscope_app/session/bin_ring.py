"""A ring of fixed time bins, one row of a 2-D array a column. Owns the storage and the gaps.

A bin has an absolute number (`time_ns // bin_ns`); the ring keeps the newest `num_bins`. Sums count what
happened inside a bin, gauges say how things stood at its end, points were measured in it and say nothing of the next.
A bin nobody reported on is NaN: a gap in a curve, never a zero. Knows no messages and no Qt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
NONE: Final = -(1 << 62)


class BinRing:
    """Columns `sums + gauges + points` over the newest `num_bins` bins."""

    def __init__(self, sums: Sequence[str], gauges: Sequence[str], num_bins: int, points: Sequence[str] = ()) -> None:
        self.num_bins = num_bins
        self.newest = NONE
        """Absolute number of the newest bin, `NONE` while there is none. Before this machine's boot it is negative."""
        self._num_sums = len(sums)
        self._gauges = slice(len(sums), len(sums) + len(gauges))
        """The rows that go on from bin to bin."""
        self._row = {name: row for row, name in enumerate((*sums, *gauges, *points))}
        self._data = np.full((len(self._row), num_bins), np.nan)

    @property
    def num_bytes(self) -> int:
        """Memory of the ring."""
        return self._data.nbytes

    def advance(self, bin_number: int, *, carry: bool) -> None:
        """Make `bin_number` the newest bin. Bins on the way hold zero sums and the gauges before them
        when `carry`, NaN otherwise. An older number changes nothing."""
        if bin_number <= self.newest:
            return
        first = max(self.newest + 1, bin_number - self.num_bins + 1) if self.newest != NONE else bin_number
        fresh = np.arange(first, bin_number + 1) % self.num_bins
        gauges = self._data[self._gauges, self.newest % self.num_bins].copy()
        self._data[:, fresh] = np.nan
        if carry and self.newest != NONE:
            self._data[: self._num_sums, fresh] = 0.0
            self._data[self._gauges, fresh] = gauges[:, None]
        else:
            self._data[: self._num_sums, fresh[-1]] = 0.0
        self.newest = bin_number

    def add(self, bin_numbers: IntArray, values: Mapping[str, IntArray]) -> None:
        """Add one entry a frame, shape (n,), to the sums. Bins that left the ring are dropped."""
        if not bin_numbers.size:
            return
        columns = np.stack(list(values.values()))
        rows = np.array([self._row[name] for name in values])
        for number in range(max(int(bin_numbers.min()), self.newest - self.num_bins + 1), self.newest + 1):
            inside = bin_numbers == number
            if inside.any():
                slot = number % self.num_bins
                before = self._data[rows, slot]
                before[np.isnan(before)] = 0.0
                self._data[rows, slot] = before + columns[:, inside].sum(axis=1)

    def put(self, bin_numbers: IntArray, values: Mapping[str, IntArray | FloatArray]) -> None:
        """Set gauges or points, shape (n,), oldest first; the last of a bin stands."""
        inside = (bin_numbers > self.newest - self.num_bins) & (bin_numbers <= self.newest)
        slots = bin_numbers[inside] % self.num_bins
        for name, column in values.items():
            self._data[self._row[name], slots] = column[inside]

    def put_one(self, bin_number: int, values: Mapping[str, float]) -> None:
        """Set gauges or points of one bin."""
        if self.newest - self.num_bins < bin_number <= self.newest:
            for name, value in values.items():
                self._data[self._row[name], bin_number % self.num_bins] = value

    def read(self, first: int, last: int, names: Iterable[str] | None = None) -> dict[str, FloatArray]:
        """Columns (all, or `names`) over bins `first` to `last` inclusive; NaN outside what the ring holds."""
        numbers = np.arange(first, last + 1)
        held = (numbers > self.newest - self.num_bins) & (numbers <= self.newest)
        slots = numbers % self.num_bins
        wanted = self._row if names is None else names
        return {name: np.where(held, self._data[self._row[name], slots], np.nan) for name in wanted}

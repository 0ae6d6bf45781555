"""Cell keys of every second of an overview, computed once, and the maximum key in any time range.

Above `max_rows` rows, pairs of rows are merged. Must not depend on colours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.heatmap.address_rows import Keys, max_over_ranges
from kvscope_app.views.heatmap.time_scale import TimeScale
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

IntArray = npt.NDArray[np.int64]
MakeKeys = Callable[[SessionOverview, IntArray], Keys]
"""Function that computes keys, shape (n, cells), from an overview and the indices of n seconds in it."""
MAX_ROWS: Final = 16_384
"""Maximum number of rows in a key store, enough for 4.5 hours at one row per second."""
_SECONDS_PER_BATCH: Final = 1_024


class KeyStore:
    """Table of cell keys with a row of `num_cells` keys per second, or per several seconds after merging."""

    def __init__(self, make_keys: MakeKeys, num_cells: int, max_rows: int = MAX_ROWS) -> None:
        self.num_computed = 0
        self.num_cells = num_cells
        self._make_keys, self._max_rows = make_keys, max_rows
        self._stride = 1
        self._size = 0
        self._begin_ns = np.empty(64, np.int64)
        self._end_ns = np.empty(64, np.int64)
        self._keys = np.empty((64, num_cells), np.uint8)
        self._version: tuple[SessionOverview, int] | None = None

    def __len__(self) -> int:
        return self._size

    @property
    def first_ns(self) -> int:
        return int(self._begin_ns[0]) if self._size else 0

    @property
    def last_ns(self) -> int:
        return int(self._end_ns[self._size - 1]) if self._size else 0

    def update(self, overview: SessionOverview) -> int | None:
        """Compute the keys of the overview's new seconds.

        Returns the time in ns from which keys may have changed, or None if nothing changed.
        """
        if self._version == (overview, overview.version):
            return None
        is_same = self._version is not None and self._version[0] is overview
        self._version = (overview, overview.version)
        num_valid = self._num_valid(overview) if is_same else 0
        first = int(np.searchsorted(overview.time_ns, self._end_ns[num_valid - 1], "left")) if num_valid else 0
        from_ns = int(self._begin_ns[num_valid]) if num_valid < self._size else None
        self._size = num_valid
        if first < len(overview):
            from_ns = min(from_ns or int(overview.time_ns[first]), int(overview.time_ns[first]))
            for start in range(first, len(overview), _SECONDS_PER_BATCH * self._stride):
                self._append(overview, np.arange(start, min(start + _SECONDS_PER_BATCH * self._stride, len(overview))))
        return from_ns

    def columns(self, scale: TimeScale, first: int, last: int) -> Keys:
        """Return the maximum keys in the columns `first` to `last` (exclusive) of `scale`, shape (columns, cells).

        Columns without data have key 0.
        """
        edges = (scale.first + np.arange(first, last + 1, dtype=np.int64)) * scale.column_ns
        starts = np.searchsorted(self._end_ns[: self._size], edges[:-1], "right")
        ends = np.searchsorted(self._begin_ns[: self._size], edges[1:], "left")
        return max_over_ranges(self._keys[: self._size], starts, ends, axis=0)

    def _num_valid(self, overview: SessionOverview) -> int:
        """Return the number of rows, from the first, that need not be computed again.

        The last row is always computed again, because its second may have been incomplete.
        """
        start_ns, times = self._begin_ns[: self._size], overview.time_ns
        if not times.size:
            return 0
        num_dropped = int(np.searchsorted(self._end_ns[: self._size], times[0], "right"))
        if num_dropped:
            self._drop_first(num_dropped)
            start_ns = self._begin_ns[: self._size]
        complete_ns = start_ns[1:] if start_ns.size and start_ns[0] < times[0] else start_ns
        indices = np.minimum(np.searchsorted(times, complete_ns), times.size - 1)
        mismatches = np.flatnonzero(times[indices] != complete_ns)
        num_valid = start_ns.size - complete_ns.size + (int(mismatches[0]) if mismatches.size else complete_ns.size)
        return max(min(num_valid, self._size - 1), 0)

    def _drop_first(self, count: int) -> None:
        num_left = self._size - count
        for array in (self._begin_ns, self._end_ns, self._keys):
            array[:num_left] = array[count : self._size].copy()
        self._size = num_left

    def _append(self, overview: SessionOverview, indices: IntArray) -> None:
        keys = self._make_keys(overview, indices)
        self.num_computed += len(indices)
        times = overview.time_ns[indices]
        starts = np.arange(0, len(indices), self._stride)
        if self._stride > 1:
            keys = np.maximum.reduceat(keys, starts, axis=0)
        ends = times[np.minimum(starts + self._stride, len(indices)) - 1] + SECOND_NS
        self._reserve(self._size + starts.size)
        rows = slice(self._size, self._size + starts.size)
        self._begin_ns[rows], self._end_ns[rows], self._keys[rows] = times[starts], ends, keys
        self._size += starts.size
        while self._size > self._max_rows:
            self._merge_pairs()

    def _reserve(self, size: int) -> None:
        capacity = self._begin_ns.size
        if size <= capacity:
            return
        num_added = max(size, 2 * capacity) - capacity
        self._begin_ns = np.concatenate((self._begin_ns, np.empty(num_added, np.int64)))
        self._end_ns = np.concatenate((self._end_ns, np.empty(num_added, np.int64)))
        self._keys = np.concatenate((self._keys, np.empty((num_added, self.num_cells), np.uint8)))

    def _merge_pairs(self) -> None:
        starts = np.arange(0, self._size, 2)
        lasts = np.minimum(starts + 1, self._size - 1)
        self._end_ns[: starts.size] = self._end_ns[lasts]
        self._begin_ns[: starts.size] = self._begin_ns[starts]
        self._keys[: starts.size] = np.maximum(self._keys[starts], self._keys[lasts])
        self._size = starts.size
        self._stride *= 2

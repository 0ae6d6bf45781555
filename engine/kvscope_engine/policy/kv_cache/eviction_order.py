"""The order in which the cached ledger rows of a tier are evicted, and which rows are pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.kv_cache.changed_rows import ChangedRows
from kvscope_engine.policy.kv_cache.free_list import Ids

MAX_EVICTION_ORDER: Final = np.iinfo(np.uint32).max


class EvictionOrder:
    """Cached ledger rows of one tier in the order in which they are evicted, and the pinned rows.

    Owns the order, the pins and the ledger's column `eviction_order` of the tier's rows: a row gets the next number
    when it becomes evictable, and 0 when it no longer is. Pinned rows, in use or cached, are not in the order until
    they are unpinned. Callers mark the rows that they add, remove or pop as changed; `pin`, `unpin` and `refresh` mark
    the rows themselves. See docs/internals/decisions/0023-eviction-order-is-a-counter.md.
    """

    __slots__ = ("_changed", "_column", "_next_number", "_numbers", "_pinned_cached", "idle", "pinned")

    def __init__(self, column: npt.NDArray[np.uint32], changed: ChangedRows) -> None:
        self.pinned: set[int] = set()
        """Ledger rows, in use or cached, that are protected from eviction."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Evictable ledger rows; the first one is evicted next. Other classes may read it but must not change it."""
        self._pinned_cached: dict[int, None] = {}  # cached and pinned
        self._column = column
        self._numbers = column.data  # the same memory, faster for one row
        self._changed = changed
        self._next_number = 1

    def __len__(self) -> int:
        return len(self.idle)

    def __contains__(self, row: int) -> bool:
        return row in self.idle

    @property
    def num_cached(self) -> int:
        """Number of cached ledger rows, including pinned rows."""
        return len(self.idle) + len(self._pinned_cached)

    @property
    def cached(self) -> list[int]:
        """All cached ledger rows, pinned rows last."""
        return list(chain(self.idle, self._pinned_cached))

    def add(self, ids: Ids) -> None:
        """Append ledger rows that became cached. The first of `ids` is evicted first."""
        rows: list[int] = ids.tolist()
        if self.pinned:
            self._pinned_cached.update(dict.fromkeys(row for row in rows if row in self.pinned))
            rows = [row for row in rows if row not in self.pinned]
            ids = np.array(rows, np.int64)
        number = self._reserve_numbers(len(rows))
        self._column[ids] = np.arange(number, number + len(rows), dtype=np.uint32)
        self.idle.update(dict.fromkeys(rows))

    def add_one(self, row: int) -> None:
        """Append one cached ledger row, which must not be pinned."""
        self._numbers[row] = self._reserve_numbers(1)
        self.idle[row] = None

    def remove(self, row: int) -> None:
        """Remove a cached ledger row that is in use again or whose prefix was dropped."""
        if row in self.idle:
            del self.idle[row]
            self._numbers[row] = 0
        else:
            del self._pinned_cached[row]

    def refresh(self, row: int) -> None:
        """Move an evictable ledger row to the end of the order, because it was used."""
        self._numbers[row] = self._reserve_numbers(1)
        self.idle.move_to_end(row)
        self._changed.add_one(row)

    def pop(self, count: int) -> list[int]:
        """Remove and return the `count` ledger rows to be evicted next, at most `len(self)`."""
        rows = [self.idle.popitem(last=False)[0] for _ in range(count)]
        for row in rows:
            self._numbers[row] = 0
        return rows

    def pin(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.pinned.add(row)
            if row in self.idle:
                del self.idle[row]
                self._pinned_cached[row] = None
                self._numbers[row] = 0
                self._changed.add_one(row)

    def unpin(self, rows: Iterable[int]) -> None:
        """Make ledger rows evictable again. Cached rows move to the end of the order, as if they had just been used."""
        for row in rows:
            self.pinned.discard(row)
            if row in self._pinned_cached:
                del self._pinned_cached[row]
                self.add_one(row)
                self._changed.add_one(row)

    def clear(self) -> list[int]:
        """Remove every cached and pinned ledger row. Returns the cached rows, the last to be evicted first."""
        rows = self.cached[::-1]
        self._column[rows] = 0
        self.idle.clear()
        self._pinned_cached.clear()
        self.pinned.clear()
        return rows

    def check(self, start: int, stop: int) -> None:
        """Raise AssertionError if the ledger rows from `start` to `stop` (exclusive) do not agree with the order."""
        assert self._pinned_cached.keys() <= self.pinned, "a row stands aside that is not pinned"
        assert not self.idle.keys() & self.pinned, "a pinned row is to be evicted"
        numbered = start + np.flatnonzero(self._column[start:stop])
        in_order = numbered[np.argsort(self._column[numbered])].tolist()
        assert in_order == list(self.idle), f"the ledger's order of eviction is {in_order}, not {list(self.idle)}"

    def _reserve_numbers(self, count: int) -> int:
        """Return the first of `count` unused values of the column `eviction_order`.

        When the values run out, evictable rows are numbered from 1 again.
        """
        if self._next_number + count > MAX_EVICTION_ORDER:
            rows = np.fromiter(self.idle, np.int64, len(self.idle))
            self._column[rows] = np.arange(1, len(rows) + 1, dtype=np.uint32)
            self._changed.add(rows)
            self._next_number = len(rows) + 1
        first = self._next_number
        self._next_number += count
        return first

"""Which rows of the ledger were touched since the last frame. Costs O(touched), bounded by the pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ChangedRows:
    """A set of row ids, kept as marks and a list: adding and taking never scan all `num_rows`."""

    __slots__ = ("_ids", "_marks", "_marks_array")

    def __init__(self, num_rows: int) -> None:
        self._marks = bytearray(num_rows)
        self._marks_array = np.frombuffer(self._marks, np.bool_)  # the same memory, for many rows at once
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add_one(self, row: int) -> None:
        """Mark one row."""
        if not self._marks[row]:
            self._marks[row] = True
            self._ids.append(row)

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        """Mark rows, shape `(n,)`, each at most once."""
        fresh = rows[~self._marks_array[rows]]
        self._marks_array[fresh] = True
        self._ids += fresh.tolist()

    def take(self) -> npt.NDArray[np.uint32]:
        """The rows marked since the last call, sorted; nothing is marked after it."""
        rows = np.array(self._ids, np.uint32)
        rows.sort()
        self._marks_array[rows] = False
        self._ids = []
        return rows

"""The set of ledger rows changed since the last telemetry frame."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ChangedRows:
    """Set of changed ledger rows, as one flag per row and a list.

    Costs O(changed), bounded by the pool. Adding and draining never scan all `num_rows`.
    """

    __slots__ = ("_flags", "_flags_array", "_ids")

    def __init__(self, num_rows: int) -> None:
        self._flags = bytearray(num_rows)
        self._flags_array = np.frombuffer(self._flags, np.bool_)  # the same memory, for many rows in one call
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add_one(self, row: int) -> None:
        if not self._flags[row]:
            self._flags[row] = True
            self._ids.append(row)

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        """Mark ledger rows, shape `(n,)` without duplicates, as changed."""
        new_rows = rows[~self._flags_array[rows]]
        self._flags_array[new_rows] = True
        self._ids += new_rows.tolist()

    def drain(self) -> npt.NDArray[np.uint32]:
        """Return the changed ledger rows, sorted, and clear the set."""
        rows = np.array(self._ids, np.uint32)
        rows.sort()
        self._flags_array[rows] = False
        self._ids = []
        return rows

"""numpy columns of one length that grow at their end. Knows no meaning of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class GrowingColumns:
    """Named columns; `append` one row, read each as an array, shape (n,)."""

    def __init__(self, dtypes: Mapping[str, type[np.generic]]) -> None:
        self._size = 0
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(64, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name][: self._size]

    def append(self, *values: int) -> int:
        """Add a row, values in the order of the columns; its place."""
        place = self._size
        if place == next(iter(self._columns.values())).size:
            self._columns = {name: np.concatenate((c, np.empty_like(c))) for name, c in self._columns.items()}
        for column, value in zip(self._columns.values(), values, strict=True):
            column[place] = value
        self._size += 1
        return place

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Rows where `kept`, shape (n,), is false go."""
        self._size = int(np.count_nonzero(kept))
        for name, column in self._columns.items():
            left = column[: kept.size][kept]
            self._columns[name] = np.concatenate((left, np.empty(max(64, left.size // 2), column.dtype)))

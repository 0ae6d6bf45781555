"""Table for export: columns with a type, a unit and a description. Must not depend on a file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

ColumnType = Literal["int", "float", "text", "time"]
"""Type of a column's values. A `time` is nanoseconds since 1970, UTC."""
DTYPES: Final = {"int": np.dtype(np.int64), "float": np.dtype(np.float64), "time": np.dtype(np.int64)}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `values` has one value per row; unknown ones are None, or NaN in floats."""

    name: str
    type: ColumnType
    values: Sequence[int | None] | Sequence[str] | npt.NDArray[np.float64] | npt.NDArray[np.int64]
    unit: str = ""
    """"s", "ns", "tokens", "blocks", ...; "" if there is none."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    about: dict[str, str]

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].values)

"""A table to be taken elsewhere: columns with a type, a unit and a word on what they are. Knows no format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

ColumnType = Literal["int", "float", "text", "time"]
"""`time`: nanoseconds since 1970, UTC."""
DTYPES: Final = {"int": np.dtype(np.int64), "float": np.dtype(np.float64), "time": np.dtype(np.int64)}


@dataclass(frozen=True, slots=True)
class Column:
    """One of a table. `values` holds a value a row; None, and NaN in floats, where it is not known."""

    name: str
    type: ColumnType
    values: Sequence[int | None] | Sequence[str] | npt.NDArray[np.float64] | npt.NDArray[np.int64]
    unit: str = ""
    """"s", "ns", "tokens", "blocks", …; empty where there is none."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of the same length."""

    name: str
    columns: tuple[Column, ...]
    about: dict[str, str]
    """What the whole is of: model, range, where times count from."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.columns[0].values)

"""A table as CSV: UTF-8, a header with the names, which bear the units; empty where a value is not known."""

from __future__ import annotations

import csv
import io
from typing import BinaryIO, Final

import numpy as np

from kvscope_telemetry.exports.tables.table import Column, Table

_ROWS_AT_ONCE: Final = 4_096
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def write_csv(table: Table, file: BinaryIO) -> None:
    """Write all of it."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow([column.name for column in table.columns])
    for first in range(0, table.num_rows, _ROWS_AT_ONCE):
        writer.writerows(zip(*(_cells(column, first) for column in table.columns), strict=True))
    text.flush()
    text.detach()


def _cells(column: Column, first: int) -> list[str]:
    values = column.values[first : first + _ROWS_AT_ONCE]
    if column.type == "text":
        return [_text(str(value)) for value in values]
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return ["" if value is None or value != value else repr(value) for value in listed]


def _text(value: str) -> str:
    """What a spreadsheet would take for a formula is led by an apostrophe: prompts' names come from anybody."""
    return f"'{value}" if value.startswith(_FORMULA) else value

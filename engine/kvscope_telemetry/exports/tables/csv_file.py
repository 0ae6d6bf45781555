"""Writes a table as CSV for programs and spreadsheets: UTF-8, a header of column names, and empty cells for unknown
values.

Each `time` column is preceded by a column with the time as text (UTC, milliseconds), because spreadsheets round the 19
digits of nanoseconds.
"""

from __future__ import annotations

import codecs
import csv
import io
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.printable import printable

_ROWS_AT_ONCE: Final = 4_096
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def write_csv(table: Table, file: BinaryIO) -> None:
    if file.seekable():  # not a pipe; without the byte order mark, spreadsheets guess the encoding
        file.write(codecs.BOM_UTF8)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    columns = _with_readable_times(table.columns)
    writer.writerow([column.name for column in columns])
    for first in range(0, table.num_rows, _ROWS_AT_ONCE):
        writer.writerows(zip(*(_cells(column, first) for column in columns), strict=True))
    text.flush()
    text.detach()


def readable_name(column: Column) -> str:
    return column.name.removesuffix("_ns") + "_utc"


def _with_readable_times(columns: tuple[Column, ...]) -> list[Column]:
    columns_with_times: list[Column] = []
    for column in columns:
        if column.type == "time":
            columns_with_times.append(
                Column(readable_name(column), "text", _readable(np.asarray(column.values, np.int64)))
            )
        columns_with_times.append(column)
    return columns_with_times


def _readable(times_ns: npt.NDArray[np.int64]) -> list[str]:
    """Format times like `2026-11-29 12:34:56.789`."""
    texts = np.datetime_as_string((times_ns // 1_000_000).astype("datetime64[ms]"), unit="ms")
    return [str(text).replace("T", " ") for text in texts]


def _cells(column: Column, first: int) -> list[str]:
    values = column.values[first : first + _ROWS_AT_ONCE]
    if column.type == "text":
        return [_text(str(value)) for value in values]
    cells = values.tolist() if isinstance(values, np.ndarray) else values
    return ["" if value is None or value != value else repr(value) for value in cells]


def _text(value: str) -> str:
    """Make text safe for spreadsheets: no formulas, no control characters. Request ids are chosen by clients."""
    value = printable(value, keep="\n\t\r", replacement="\ufffd")
    return f"'{value}" if value.startswith(_FORMULA) else value

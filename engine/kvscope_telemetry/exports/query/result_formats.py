"""Formats of a query result: text table, JSON, and a table for the writers of `exports.tables`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.printable import printable

if TYPE_CHECKING:
    from kvscope_telemetry.exports.query.recording_database import QueryResult

UNKNOWN: Final = "–"
_INTEGERS: Final = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_LARGE_INTEGERS: Final = ("UBIGINT", "HUGEINT", "UHUGEINT")
"""Types whose values may exceed 64 bits with sign."""
_FLOATS: Final = ("FLOAT", "DOUBLE", "DECIMAL")
_MAX_CELL: Final = 60


def is_number(type_name: str) -> bool:
    return _base_type(type_name) in (*_INTEGERS, *_LARGE_INTEGERS, *_FLOATS)


def _base_type(type_name: str) -> str:
    """Return a type without its precision, such as DECIMAL for DECIMAL(2,1); "" for lists and arrays."""
    return "" if type_name.endswith("]") else type_name.partition("(")[0]


def cell_text(value: Any) -> str:
    """Return a value as text for a person: numbers rounded to 6 digits, unknown ones as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if isinstance(value, float | Decimal):
        return f"{float(value):.6g}"
    return _plain_text(value)


def as_text(result: QueryResult) -> str:
    """Return a table with aligned columns, numbers to the right. Long cells are shortened."""
    kinds = [is_number(name) for name in result.types]
    lines = [result.names, *(tuple(_shortened(cell_text(value)) for value in row) for row in result.rows)]
    lines = [tuple(printable(cell) for cell in line) for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, kinds, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(texts)


def json_lines(result: QueryResult) -> Iterator[str]:
    """Yield the lines of a JSON array with one object per row. Unknown and infinite numbers are null."""
    yield "["
    for index, row in enumerate(result.rows):
        record = dict(zip(result.names, map(_json_value, row), strict=True))
        yield json.dumps(record, allow_nan=False) + ("," if index < len(result.rows) - 1 else "")
    yield "]"


def as_table(result: QueryResult) -> Table:
    """Return the result as a table for export. Integers beyond 64 bits and types other than numbers become text."""
    columns = []
    for index, (name, type_name) in enumerate(zip(result.names, result.types, strict=True)):
        values = [row[index] for row in result.rows]
        base = _base_type(type_name)
        if base in _FLOATS:
            numbers = np.array([math.nan if value is None else float(value) for value in values], np.float64)
            columns.append(Column(name, "float", numbers))
        elif base in _INTEGERS or (base in _LARGE_INTEGERS and all(map(_fits, values))):
            columns.append(Column(name, "int", values))
        else:
            texts = ["" if value is None else _plain_text(value) for value in values]
            columns.append(Column(name, "text", texts))
    return Table("query", tuple(columns), {})


def _fits(value: int | None) -> bool:
    return value is None or -(1 << 63) <= value < 1 << 63


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def _plain_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | Mapping):
        return json.dumps(_json_value(value), ensure_ascii=False)
    return str(_json_value(value))


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value)

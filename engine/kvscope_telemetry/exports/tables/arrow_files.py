"""Writes a table as Parquet or Arrow IPC, with types, and with units and descriptions in the metadata of columns.

Requires pyarrow, which is not a dependency of kvscope; the error explains how to install it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, BinaryIO, Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.tables.table import Column, Table

_ROWS_A_GROUP: Final = 1 << 16


def require_pyarrow(suffix: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise BadInput(
            f"{suffix} needs pyarrow, which is not installed: pip install 'kvscope[export]' (.csv needs none)"
        )


def write_parquet(table: Table, file: BinaryIO) -> None:
    importlib.import_module("pyarrow.parquet").write_table(
        arrow_table(table), file, compression="zstd", row_group_size=_ROWS_A_GROUP
    )


def write_arrow(table: Table, file: BinaryIO) -> None:
    pa, content = _pyarrow(), arrow_table(table)
    with pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=_ROWS_A_GROUP)


def _pyarrow() -> Any:
    return importlib.import_module("pyarrow")


def arrow_table(table: Table) -> Any:
    """Return the table as a `pyarrow.Table`."""
    pa = _pyarrow()
    types: dict[str, Any] = {
        "int": pa.int64(),
        "float": pa.float64(),
        "text": pa.string(),
        "time": pa.timestamp("ns", tz="UTC"),
    }

    def field(column: Column) -> Any:
        metadata = {"unit": column.unit, "description": column.description}
        return pa.field(column.name, types[column.type], metadata={k: v for k, v in metadata.items() if v})

    # NaN marks unknown values in numpy; `from_pandas` converts it to null.
    arrays = [pa.array(column.values, types[column.type], from_pandas=True) for column in table.columns]
    schema = pa.schema([field(column) for column in table.columns], metadata={"table": table.name, **table.about})
    return pa.Table.from_arrays(arrays, schema=schema)

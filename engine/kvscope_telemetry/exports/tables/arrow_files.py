"""A table as Parquet or as an Arrow IPC file, with types, and units and descriptions in the metadata of its columns.

Needs pyarrow, which kvscope does not bring by itself: says how to get it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, BinaryIO, Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.tables.table import Column, Table

_ROWS_A_GROUP: Final = 1 << 16


def require_pyarrow(suffix: str) -> None:
    """Raise BadInput where it is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise BadInput(
            f"{suffix} needs pyarrow, which is not installed: pip install 'kvscope[export]' (.csv needs none)"
        )


def write_parquet(table: Table, file: BinaryIO) -> None:
    """Write all of it, compressed with zstd."""
    importlib.import_module("pyarrow.parquet").write_table(
        _as_arrow(table), file, compression="zstd", row_group_size=_ROWS_A_GROUP
    )


def write_arrow(table: Table, file: BinaryIO) -> None:
    """Write all of it as an IPC file (also known as Feather)."""
    pa, made = _pyarrow(), _as_arrow(table)
    with pa.ipc.new_file(file, made.schema) as writer:
        writer.write_table(made, max_chunksize=_ROWS_A_GROUP)


def _pyarrow() -> Any:
    """It bears no types, and is imported only where it is needed."""
    return importlib.import_module("pyarrow")


def _as_arrow(table: Table) -> Any:
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

    # NaN is what numpy has for "not known"; Arrow has a word for it.
    arrays = [pa.array(column.values, types[column.type], from_pandas=True) for column in table.columns]
    schema = pa.schema([field(column) for column in table.columns], metadata={"table": table.name, **table.about})
    return pa.Table.from_arrays(arrays, schema=schema)

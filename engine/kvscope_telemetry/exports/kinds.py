"""Formats and tables that a recording can be exported to. The command line and the dialog are derived from them.

Does not import the modules that it names, because the command line needs the lists before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    from kvscope_telemetry.exports.content import Content
    from kvscope_telemetry.exports.tables.table import Table


@dataclass(frozen=True, slots=True)
class Format:
    """An export format, other than an image."""

    name: str
    suffixes: tuple[str, ...]
    """File extensions, the usual one first."""
    title: str
    description: str = ""
    """Description in the dialog, for formats without tables."""
    module: str = ""
    """Module in `exports.tables` that contains the writer; "" for formats without tables, whose writers are called by
    `exports.export`.
    """
    function: str = ""
    """Function in `module` that writes a table to a binary file."""
    needs_pyarrow: bool = False

    @property
    def is_of_tables(self) -> bool:
        return bool(self.module)

    def writer(self) -> Callable[[Table, BinaryIO], None]:
        function: Callable[[Table, BinaryIO], None] = _imported(self.module, self.function)
        return function


@dataclass(frozen=True, slots=True)
class TableKind:
    name: str
    row: str
    """Object that one table row describes, such as "second" or "request"."""
    module: str
    """Module in `exports.tables` that contains the function `function`, which makes the table from a `Content`."""
    function: str

    def table(self, content: Content) -> Table:
        exported: Table = _imported(self.module, self.function)(content)
        return exported


FORMATS: Final = (
    Format("csv", (".csv",), "CSV", module="csv_file", function="write_csv"),
    Format("parquet", (".parquet",), "Parquet", module="arrow_files", function="write_parquet", needs_pyarrow=True),
    Format("arrow", (".arrow",), "Arrow", module="arrow_files", function="write_arrow", needs_pyarrow=True),
    Format(
        "html", (".html",), "HTML report", "One file with figures, charts, and why the most delayed requests were late"
    ),
    Format(
        "perfetto",
        (".perfetto-trace", ".pftrace"),
        "Perfetto trace",
        "For ui.perfetto.dev: counters, one track per request",
    ),
)
TABLES: Final = (
    TableKind("metrics", "second", "tables", "metrics_table"),
    TableKind("requests", "request", "tables", "requests_table"),
    TableKind("steps", "step", "steps_table", "steps_table"),
    TableKind("events", "event", "tables", "events_table"),
    TableKind("bookmarks", "bookmark or alarm", "tables", "bookmarks_table"),
    TableKind("devices", "device and sample", "devices_table", "devices_table"),
)
TABLE_NAMES: Final = tuple(kind.name for kind in TABLES)


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(f"kvscope_telemetry.exports.tables.{module}"), name)

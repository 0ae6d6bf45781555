"""What a recording can be exported as: an entry for each format and for each table. Command line and dialog follow.

Imports nothing of what it names: the command line asks before anything is loaded.
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
    """One that is no picture."""

    name: str
    """What a person calls it."""
    suffixes: tuple[str, ...]
    """Of its files, the usual one first."""
    title: str
    about: str = ""
    """In the dialog, of one that is no table."""
    module: str = ""
    """Of one for tables, in `exports.tables`: what writes one."""
    function: str = ""
    needs_pyarrow: bool = False

    @property
    def is_of_tables(self) -> bool:
        """Whether it is for tables."""
        return bool(self.module)

    def writer(self) -> Callable[[Table, BinaryIO], None]:
        """What writes a table, imported now."""
        found: Callable[[Table, BinaryIO], None] = _imported(self.module, self.function)
        return found


@dataclass(frozen=True, slots=True)
class TableKind:
    """One table."""

    name: str
    row: str
    """What it has a row of: per second, per request, …"""
    module: str
    """In `exports.tables`."""
    function: str
    """Makes it."""

    def table(self, content: Content) -> Table:
        """Of this range."""
        made: Table = _imported(self.module, self.function)(content)
        return made


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
    TableKind("events", "event", "tables", "events_table"),
    TableKind("bookmarks", "bookmark or alarm", "tables", "bookmarks_table"),
    TableKind("devices", "device and sample", "devices_table", "devices_table"),
)
KINDS: Final = tuple(kind.name for kind in TABLES)
"""What there is a table of."""


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(f"kvscope_telemetry.exports.tables.{module}"), name)

"""In-memory DuckDB database with the tables of a recording, for SQL queries that come from a user.

Owns the restrictions: a query reads only these tables. It has no access to files, the network or extensions, changes
nothing, and its memory is limited. Columns are those of `exports.tables`, with times as integers (nanoseconds).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.exported_bookmarks import bookmarks_in
from kvscope_telemetry.exports.kinds import TABLE_NAMES, TABLES
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.exports.tables.arrow_files import arrow_table
from kvscope_telemetry.exports.tables.table import Table
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import Bookmark

MEMORY_LIMIT: Final = "1 GB"
_NUM_THREADS: Final = 2
_AT_START: Final = {
    "memory_limit": MEMORY_LIMIT,
    "threads": _NUM_THREADS,
    "temp_directory": "",  # a query that exceeds the memory limit fails instead of writing files
    "python_enable_replacements": False,  # otherwise a query could read variables of this process
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
_LOCKS: Final = ("SET enable_external_access = false", "SET lock_configuration = true")
_ACCEPTED: Final = ("SELECT", "EXPLAIN", "MULTI")
"""Names of accepted statement types. DESCRIBE, SUMMARIZE and SHOW are of type SELECT; PIVOT is MULTI."""
_NO_TABLE: Final = re.compile(r"Table with name (.+?) does not exist")
_HINTS: Final = ("Candidate bindings", "Did you mean")


@dataclass(frozen=True, slots=True)
class QueryResult:
    names: tuple[str, ...]
    """Name of each column. Names are unique: repeated ones get a suffix such as `_2`."""
    types: tuple[str, ...]
    """DuckDB type of each column, such as BIGINT."""
    rows: list[tuple[Any, ...]]
    """None is an unknown value."""
    has_more: bool
    """Whether rows beyond `max_rows` were left out."""


class RecordingDatabase:
    """Tables of a recording as a database. A table is loaded by the first query that uses it.

    One thread at a time may use it, apart from `interrupt`.
    """

    def __init__(
        self,
        recording: Recording,
        from_s: float | None = None,
        until_s: float | None = None,
        watch: ProgressCallback | None = None,
        bookmarks: Iterable[Bookmark] = (),
    ) -> None:
        """Read the overview of the recording. `watch` receives the progress of reading.

        Raises BadInput if DuckDB is not installed or the range is empty.
        """
        require_duckdb()
        span = span_of(recording, from_s, until_s)
        marks = bookmarks_in(recording, span, bookmarks)
        self._content = Content(recording, read_overview(recording, watch), span, marks, watch)
        self._duckdb = importlib.import_module("duckdb")
        self._connection = self._duckdb.connect(":memory:", config=_AT_START)
        for lock in _LOCKS:
            self._connection.execute(lock)
        self._loaded: set[str] = set()
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def query(self, sql: str, max_rows: int | None = None) -> QueryResult:
        """Run one SELECT statement.

        Raises:
            BadInput: The statement is not accepted or fails; one line.
            QueryInterrupted: `interrupt` was called.
            KeyboardInterrupt: SIGINT arrived while the query ran.
        """
        self._is_interrupted = False
        with self._errors_in_one_line():
            self._check_statement(sql)
            self._load_in_memory(self._tables_of(sql))
            if self._is_interrupted:  # between two statements, DuckDB ignores an interrupt
                raise QueryInterrupted("the query was stopped")
            # A read-only transaction, because EXPLAIN ANALYZE runs statements of any type.
            self._connection.execute("BEGIN TRANSACTION READ ONLY")
            try:
                cursor = self._connection.execute(sql)
                columns = [(str(name), str(kind)) for name, kind, *_ in cursor.description]
                rows = cursor.fetchall() if max_rows is None else cursor.fetchmany(max_rows + 1)
            finally:
                with contextlib.suppress(self._duckdb.Error):
                    self._connection.execute("ROLLBACK")
        names, types = tuple(_unique(name for name, _ in columns)), tuple(kind for _, kind in columns)
        kept = rows if max_rows is None else rows[:max_rows]
        return QueryResult(names, types, kept, has_more=len(kept) < len(rows))

    def interrupt(self) -> None:
        """Stop a running query. Can be called from any thread."""
        self._is_interrupted = True
        self._connection.interrupt()

    def _check_statement(self, sql: str) -> None:
        statements = self._duckdb.extract_statements(sql)
        if len(statements) != 1:
            raise BadInput(f"{len(statements)} SQL statements are not accepted: a query is one SELECT statement")
        kind = statements[0].type.name
        if kind not in _ACCEPTED:
            raise BadInput(
                f"{kind} is not accepted: a query is a SELECT, DESCRIBE, SUMMARIZE, SHOW, PIVOT or EXPLAIN statement"
            )

    def _tables_of(self, sql: str) -> set[str]:
        """Return the tables that a query needs; all if it does not name any, as SHOW TABLES."""
        try:
            named = {name.lower() for name in self._connection.get_table_names(sql)}
        except self._duckdb.Error:  # PIVOT
            return set(TABLE_NAMES)
        return named if named and named <= set(TABLE_NAMES) else set(TABLE_NAMES)

    def _load_in_memory(self, names: set[str]) -> None:
        try:
            self._load(names)
        except self._duckdb.OutOfMemoryException:
            raise BadInput(
                f"the tables of this recording need more than {MEMORY_LIMIT} of memory: choose a range with --from and"
                " --until"
            ) from None

    def _load(self, names: set[str]) -> None:
        for kind in TABLES:
            if kind.name in names - self._loaded:
                self._create(kind.table(self._content))
                self._loaded.add(kind.name)

    def _create(self, table: Table) -> None:
        integers = [replace(column, type="int") if column.type == "time" else column for column in table.columns]
        self._connection.register("loading", arrow_table(replace(table, columns=tuple(integers))))
        self._connection.execute(f'CREATE OR REPLACE TABLE "{table.name}" AS SELECT * FROM loading')
        self._connection.unregister("loading")
        for column in table.columns:
            text = ": ".join(part for part in (column.unit, column.description) if part).replace("'", "''")
            self._connection.execute(f"""COMMENT ON COLUMN "{table.name}"."{column.name}" IS '{text}'""")

    @contextlib.contextmanager
    def _errors_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except self._duckdb.InterruptException:
            raise QueryInterrupted("the query was stopped") from None
        except self._duckdb.OutOfMemoryException:
            raise BadInput(
                f"the query needs more than {MEMORY_LIMIT} of memory: select fewer rows or columns"
            ) from None
        except self._duckdb.Error as error:
            raise BadInput(_one_line(str(error))) from None
        except RuntimeError as error:  # DuckDB's error for SIGINT
            if "interrupted" not in str(error):
                raise
            raise KeyboardInterrupt from None


class QueryInterrupted(KvscopeError):
    """The query was stopped by `RecordingDatabase.interrupt`."""


def require_duckdb() -> None:
    """Raise BadInput, with the command to install it, if DuckDB is missing."""
    for name in ("duckdb", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"queries need {name}, which is not installed: pip install 'kvscope[query]'")


def _one_line(message: str) -> str:
    """Shorten a message of DuckDB to its first line and the names that it suggests."""
    if found := _NO_TABLE.search(message):
        return f"there is no table {found[1]!r:.60}: the tables are {', '.join(TABLE_NAMES)}"
    first, *others = [line.strip() for line in message.splitlines() if line.strip()] or ["the query failed"]
    hints = [line for line in others if line.startswith(_HINTS)]
    return " ".join([first, *hints[:1]])[:400]


def _unique(names: Iterable[str]) -> Iterator[str]:
    used: set[str] = set()
    for name in names:
        unique, count = name, 1
        while unique in used:
            count += 1
            unique = f"{name}_{count}"
        used.add(unique)
        yield unique

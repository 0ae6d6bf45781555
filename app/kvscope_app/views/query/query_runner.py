"""Runs queries over a session's recorded data on a thread, one at a time. Imports no Qt, and DuckDB only on the thread.

Owns the database. A complete recording is loaded once; one that grows is read again for each query.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvscope_app.session.background import Background
from kvscope_app.session.session import Session
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.whole_file import replace_file

if TYPE_CHECKING:
    from kvscope_app.session.recording.recording_handle import RecordingHandle
    from kvscope_telemetry.exports.query.recording_database import QueryResult, RecordingDatabase

MAX_ROWS: Final = 100_000
"""Maximum number of rows that are shown. Exported files have all."""
NO_DATA: Final = "there is no recorded data: recent history is off"


class QueryRunner:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._handle: RecordingHandle | None = None
        self._database: RecordingDatabase | None = None
        self._bookmarks: Sequence[Bookmark] = ()
        """Bookmarks that `_database` contains."""
        self._is_partial = False
        """Whether the recording could still grow when `_database` read it."""
        self._report_progress: ProgressCallback = lambda share: True
        self._is_cancelled = False

    def start(self, sql: str, path: Path | None = None) -> Background[QueryResult]:
        """Start a query; the previous one must have ended. With `path`, all rows are written to that CSV file, which is
        replaced when it is complete; the result then has all rows.
        """
        # The session is read here, on the GUI thread.
        if self._handle is None:
            self._handle = self._session.new_recording_handle()
        bookmarks = list(self._session.bookmarks.shown)
        self._is_cancelled = False
        return Background(lambda report: self._run(sql, path, bookmarks, report), "kvscope-query")

    def cancel(self, work: Background[QueryResult]) -> None:
        """Stop reading or the running query."""
        self._is_cancelled = True
        work.cancel()
        database = self._database  # the query's thread may replace it meanwhile
        if database is not None:
            database.interrupt()

    def close(self) -> None:
        """Release the database. No query may be running."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _run(
        self, sql: str, path: Path | None, bookmarks: Sequence[Bookmark], report_progress: ProgressCallback
    ) -> QueryResult:
        from kvscope_telemetry.exports.query.recording_database import QueryInterrupted

        self._report_progress = report_progress
        try:
            database = self._current_database(bookmarks)
            if self._is_cancelled:
                raise OpeningCancelled
            if path is None:
                return database.query(sql, MAX_ROWS)
            return _export(database, sql, path)
        except QueryInterrupted:
            raise OpeningCancelled from None

    def _current_database(self, bookmarks: Sequence[Bookmark]) -> RecordingDatabase:
        from kvscope_app.session.recording.bookmark_file import bookmark_file, read_bookmarks
        from kvscope_telemetry.exports.query.recording_database import RecordingDatabase, require_duckdb

        require_duckdb()
        if self._handle is None:
            raise KvscopeError(NO_DATA)
        recording = self._handle.get(self._watch)
        if self._database is not None and (self._is_partial or recording.may_grow or bookmarks != self._bookmarks):
            self.close()
        if self._database is None:
            self._is_partial = recording.may_grow
            stored: Iterable[Bookmark] = () if recording.may_grow else read_bookmarks(bookmark_file(recording))
            self._database = RecordingDatabase(recording, watch=self._watch, bookmarks=[*stored, *bookmarks])
            self._bookmarks = bookmarks
        return self._database

    def _watch(self, share: float) -> bool:
        return self._report_progress(share) and not self._is_cancelled


def _export(database: RecordingDatabase, sql: str, path: Path) -> QueryResult:
    from kvscope_telemetry.exports.new_file import new_file
    from kvscope_telemetry.exports.query.result_formats import as_table
    from kvscope_telemetry.exports.tables.csv_file import write_csv

    if not path.parent.is_dir():
        raise KvscopeError(f"{str(path.parent)!r} is not a folder")
    result = database.query(sql)
    with tempfile.TemporaryDirectory(prefix=".kvscope-export-", dir=path.parent) as folder:
        complete = Path(folder) / path.name
        with new_file(complete) as file:
            write_csv(as_table(result), file)
        replace_file(complete, path)
    return result

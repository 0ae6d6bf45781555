"""The list of recordings on disk: one SQLite file for all windows of all kvscopes of a person. No Qt.

Where the file cannot be written the list is that of this process alone, with what could be read, and `trouble` says so.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.library.entry import Entry, Facts
from kvscope_app.sqlite_files import Layout, open_sqlite
from kvscope_telemetry.errors import BadInput

FILE_NAME: Final = "recordings.sqlite3"
MAX_LISTED: Final = 2_000
MAX_WORDS: Final = 4_000
"""Characters of notes, and of tags."""
_FORGET_AFTER_S: Final = 7 * 24 * 3600
"""What was removed from the list can be put back so long."""
_COLUMNS: Final = "path, seen_s, facts, stamp, problem, notes, tags, picture"
_LAYOUT: Final = Layout(
    version=1,
    tables="""
CREATE TABLE IF NOT EXISTS recordings (
    path TEXT PRIMARY KEY, seen_s REAL NOT NULL, facts BLOB NOT NULL DEFAULT '{}', stamp TEXT NOT NULL DEFAULT '',
    problem TEXT NOT NULL DEFAULT '', notes TEXT NOT NULL DEFAULT '', tags TEXT NOT NULL DEFAULT '',
    picture BLOB NOT NULL DEFAULT x'', removed_s REAL
);
""",
    probe=f"SELECT {_COLUMNS}, removed_s FROM recordings LIMIT 0",
    what="list of recordings",
)
_facts: Final = msgspec.json.Decoder(Facts)


class LibraryStore:
    """In `folder`, opened when it is needed, by one thread at a time. Methods raise sqlite3.Error when it is busy."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._connection: sqlite3.Connection | None = None
        self.trouble = ""
        """Why what is changed now is not kept, or what happened to the file; empty while all is well."""

    def entries(self) -> list[Entry]:
        """The newest `MAX_LISTED`, newest first, each with whether its file is there."""
        rows = self._open().execute(
            f"SELECT {_COLUMNS} FROM recordings WHERE removed_s IS NULL ORDER BY seen_s DESC LIMIT {MAX_LISTED}"
        )
        return [_with_file(_entry(row)) for row in rows.fetchall()]

    def entry(self, path: str) -> Entry | None:
        """Return one recording, whether it is listed or was removed."""
        row = self._open().execute(f"SELECT {_COLUMNS} FROM recordings WHERE path = ?", (path,)).fetchone()
        return None if row is None else _with_file(_entry(row))

    def note(self, path: Path) -> str:
        """Record that it was written or opened now; returns the path under which it is listed."""
        listed = os.path.abspath(path).removesuffix(".part")
        self._open().execute(
            "INSERT INTO recordings (path, seen_s) VALUES (?1, ?2)"
            " ON CONFLICT (path) DO UPDATE SET seen_s = ?2, removed_s = NULL",
            (listed, time.time()),
        )
        return listed

    def keep_facts(self, path: str, facts: Facts, stamp: str, picture: bytes) -> None:
        """Store what was found in it."""
        self._open().execute(
            "UPDATE recordings SET facts = ?, stamp = ?, picture = ?, problem = '' WHERE path = ?",
            (msgspec.json.encode(facts), stamp, picture, path),
        )

    def keep_problem(self, path: str, problem: str, stamp: str) -> None:
        """Store that it could not be read; earlier facts stay."""
        self._open().execute("UPDATE recordings SET problem = ?, stamp = ? WHERE path = ?", (problem, stamp, path))

    def set_notes(self, path: str, notes: str) -> None:
        """A person's own words."""
        self._open().execute("UPDATE recordings SET notes = ? WHERE path = ?", (notes[:MAX_WORDS], path))

    def set_tags(self, path: str, tags: str) -> None:
        """A person's own tags: each once, with a space between."""
        words = " ".join(dict.fromkeys(tags.replace(",", " ").split()))[:MAX_WORDS]
        self._open().execute("UPDATE recordings SET tags = ? WHERE path = ?", (words, path))

    def remove(self, path: str) -> None:
        """Take it off the list; the file stays, and what was written about it stays for a week."""
        self._open().execute("UPDATE recordings SET removed_s = ? WHERE path = ?", (time.time(), path))

    def restore(self, path: str) -> None:
        """List again what was removed."""
        self._open().execute("UPDATE recordings SET removed_s = NULL WHERE path = ?", (path,))

    def move(self, old: str, new: str) -> None:
        """What was at `old` is at `new` now, with all that was written about it. Raises BadInput where `new` is listed
        with words of its own."""
        database = self._open()
        with closing(database.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                there = cursor.execute("SELECT notes, tags FROM recordings WHERE path = ?", (new,)).fetchone()
                if there is not None and any(there):
                    raise BadInput(f"{new!r} is already in the list, with its own notes")
                cursor.execute("DELETE FROM recordings WHERE path = ?", (new,))
                cursor.execute(
                    "UPDATE recordings SET path = ?, stamp = '', problem = '', removed_s = NULL WHERE path = ?",
                    (new, old),
                )
                cursor.execute("COMMIT")
            except BaseException:
                cursor.execute("ROLLBACK")
                raise

    def version(self) -> tuple[int, int]:
        """A value that changes when anybody changes the list, in this process or another."""
        database = self._open()
        return int(database.execute("PRAGMA data_version").fetchone()[0]), database.total_changes

    def close(self) -> None:
        """Close the database; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            warnings: list[str] = []
            try:
                self._connection = open_sqlite(self._path, _LAYOUT, warnings)
                limit_s = time.time() - _FORGET_AFTER_S
                self._connection.execute("DELETE FROM recordings WHERE removed_s < ?", (limit_s,))
            except (OSError, sqlite3.Error) as error:
                if _is_busy(error):
                    raise
                self.close()
                warnings.append(f"The list of recordings is not kept: {_reason(error)}")
                self._connection = self._in_memory()
            self.trouble = "\n".join(warnings)
        return self._connection

    def _in_memory(self) -> sqlite3.Connection:
        """With what can be read of the file."""
        memory = sqlite3.connect(":memory:", isolation_level=None)
        if self._path.is_file():
            try:
                with closing(sqlite3.connect(f"{self._path.as_uri()}?immutable=1", uri=True)) as kept:
                    kept.backup(memory)
                    memory.execute(_LAYOUT.probe)
                    return memory
            except (OSError, sqlite3.Error):
                memory.close()
                memory = sqlite3.connect(":memory:", isolation_level=None)
        memory.executescript(_LAYOUT.tables)
        return memory


def stamp_of(path: str) -> str:
    """Return a value that changes when the file does. Raises OSError when there is no file."""
    status = os.stat(path)
    return f"{status.st_size}-{status.st_mtime_ns}"


def _entry(row: tuple[object, ...]) -> Entry:
    path, seen_s, facts, stamp, problem, notes, tags, picture = row
    try:
        known = _facts.decode(facts if isinstance(facts, bytes) else str(facts))
    except msgspec.MsgspecError:  # of a later version: found out again
        known, stamp = Facts(), ""
    return Entry(
        path=str(path),
        seen_s=float(str(seen_s)),
        facts=known,
        stamp=str(stamp),
        problem=str(problem),
        notes=str(notes),
        tags=str(tags),
        picture=picture if isinstance(picture, bytes) else b"",
    )


def _with_file(entry: Entry) -> Entry:
    if os.path.exists(entry.path):
        return entry
    is_part = os.path.exists(f"{entry.path}.part")
    return replace(entry, is_missing=not is_part, is_part=is_part)


def _is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "lock" in str(error)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

"""Opens kvscope's SQLite files: creates them, checks them, and sets damaged ones aside. Imports no Qt.

Uses a write-ahead log, so that readers never wait; writers of several processes wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOCK_TIMEOUT_S: Final = 1.0
"""Maximum seconds that a writer waits for another process, which usually locks the file for milliseconds."""


@dataclass(frozen=True, slots=True)
class SqliteSchema:
    version: int
    tables: str
    """SQL that creates the missing tables."""
    probe: str
    """Query that fails if the existing tables have another schema."""
    contents: str
    """Noun for the database's contents in messages, such as `conversations`."""


def open_sqlite(path: Path, schema: SqliteSchema, warnings: list[str]) -> sqlite3.Connection:
    """Open the database at `path`, or create it. A damaged file is renamed, and a message appended to `warnings`.

    Raises OSError or sqlite3.Error if the database cannot be opened or created now.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return _connect(path, schema)
    except sqlite3.OperationalError:  # locked, full or read-only: the contents are not damaged
        raise
    except sqlite3.DatabaseError as error:
        aside = _set_aside(path)
        warnings.append(f"The {schema.contents} could not be read; its file was set aside as {aside.name} ({error})")
        return _connect(path, schema)


def _connect(path: Path, schema: SqliteSchema) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
    try:
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(str(problem)[:200])
        if connection.execute("PRAGMA user_version").fetchone()[0] < schema.version:
            _create(connection, schema)
        connection.execute(schema.probe)
    except BaseException:
        connection.close()
        raise
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)
    return connection


def _create(connection: sqlite3.Connection, schema: SqliteSchema) -> None:
    """Create the tables. Retries while other processes create them, because setting the journal mode fails then."""
    end_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(schema.tables)
            connection.execute(f"PRAGMA user_version={schema.version}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(0.01)
        else:
            return


def _set_aside(path: Path) -> Path:
    """Rename the database to an unused name, together with its write-ahead log, which may have the newest data."""
    number = 1
    while (aside := path.with_name(f"{path.name}.unreadable-{number}")).exists():
        number += 1
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    return aside

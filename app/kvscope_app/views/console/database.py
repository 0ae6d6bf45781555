"""The file conversations are kept in: opened, made, checked, and set aside when it is damaged. No Qt.

SQLite with a write-ahead log: readers never wait, and writers of several processes take turns.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

FILE_NAME: Final = "conversations.sqlite3"
_SCHEMA_VERSION: Final = 1
_WAIT_FOR_OTHERS_S: Final = 1.0
"""How long a writer waits for another process; each holds the file for milliseconds."""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS conversations (
    key TEXT PRIMARY KEY, revision INTEGER NOT NULL, changed_s REAL NOT NULL, writer TEXT NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unreadable (key TEXT, data BLOB, reason TEXT);
"""


def open_database(folder: Path, warnings: list[str]) -> sqlite3.Connection:
    """The database in `folder`, made when there is none. A damaged one is kept aside, which `warnings` tell.

    Raises OSError or sqlite3.Error where there can be none now.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / FILE_NAME
    try:
        return _open(path)
    except sqlite3.OperationalError:  # locked, full, read-only: nothing is wrong with what is in it
        raise
    except sqlite3.DatabaseError as error:
        aside = _set_aside(path)
        warnings.append(f"The conversations could not be read and were kept aside as {aside.name} ({error})")
        return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_WAIT_FOR_OTHERS_S, isolation_level=None)
    try:
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(str(problem)[:200])
        if connection.execute("PRAGMA user_version").fetchone()[0] < _SCHEMA_VERSION:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        connection.execute("SELECT key, revision, changed_s, writer, data FROM conversations LIMIT 0")
    except BaseException:
        connection.close()
        raise
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)
    return connection


def _set_aside(path: Path) -> Path:
    """Under the first name that is free, with its log, without which it may lack the newest."""
    number = 1
    while (aside := path.with_name(f"{path.name}.unreadable-{number}")).exists():
        number += 1
    path.replace(aside)
    for end in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).replace(aside.with_name(aside.name + end))
    return aside

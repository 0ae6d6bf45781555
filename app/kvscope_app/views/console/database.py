"""The file conversations are kept in, and the tables in it. No Qt."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from kvscope_app.sqlite_files import Layout, open_sqlite

FILE_NAME: Final = "conversations.sqlite3"
_LAYOUT: Final = Layout(
    version=1,
    tables="""
CREATE TABLE IF NOT EXISTS conversations (
    key TEXT PRIMARY KEY, revision INTEGER NOT NULL, changed_s REAL NOT NULL, writer TEXT NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unreadable (key TEXT, data BLOB, reason TEXT);
""",
    probe="SELECT key, revision, changed_s, writer, data FROM conversations LIMIT 0",
    what="conversations",
)


def open_database(folder: Path, warnings: list[str]) -> sqlite3.Connection:
    """The database in `folder`, made when there is none. A damaged one is kept aside, which `warnings` tell.

    Raises OSError or sqlite3.Error where there can be none now.
    """
    return open_sqlite(folder / FILE_NAME, _LAYOUT, warnings)

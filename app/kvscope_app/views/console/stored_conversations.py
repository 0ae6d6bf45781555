"""Reads stored conversations with a connection of its own, so that any thread can. Imports no Qt."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from kvscope_app.views.console.conversation import Conversation
from kvscope_app.views.console.conversation_store import FILE_NAME
from kvscope_telemetry.errors import KvscopeError


def stored_revisions(folder: Path) -> dict[str, int]:
    """Return the revision of each conversation in the database by key.

    Raises:
        KvscopeError: The database could not be read.
    """
    return dict(_query(folder, "SELECT key, revision FROM conversations", [()]))


def read_stored(folder: Path, keys: Iterable[str]) -> Iterator[Conversation]:
    """Yield the conversations with `keys`. Those that do not exist or cannot be read are skipped.

    Raises:
        KvscopeError: The database could not be read.
    """
    query = "SELECT key, data FROM conversations WHERE key = ?"
    for _, data in _query(folder, query, ((key,) for key in keys)):
        try:
            yield msgspec.json.decode(data, type=Conversation)
        except (ValueError, msgspec.MsgspecError):  # the store sets it aside and reports it at the next start
            continue


def _query(folder: Path, query: str, parameters: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    path = folder / FILE_NAME
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA query_only=1")
            for values in parameters:
                yield from database.execute(query, values)
    except sqlite3.Error as error:
        raise KvscopeError(f"the conversations were not read: {error}") from error

"""Reads all stored conversations with a connection of its own, so that any thread can. Imports no Qt."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvscope_app.views.console.conversation import Conversation
from kvscope_app.views.console.conversation_store import FILE_NAME
from kvscope_telemetry.errors import KvscopeError


@dataclass(frozen=True, slots=True)
class StoredConversation:
    revision: int
    conversation: Conversation


def read_stored(folder: Path, known: Mapping[str, int] | None = None) -> Iterator[StoredConversation]:
    """Yield the conversations in the database, except those whose revision is that in `known`.

    Conversations that cannot be read are skipped: the store sets them aside and reports them.

    Raises:
        KvscopeError: The database could not be read.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA query_only=1")
            for key, revision in database.execute("SELECT key, revision FROM conversations").fetchall():
                if known is not None and known.get(key) == revision:
                    continue
                row = database.execute("SELECT revision, data FROM conversations WHERE key = ?", (key,)).fetchone()
                if row is None:
                    continue
                try:
                    yield StoredConversation(row[0], msgspec.json.decode(row[1], type=Conversation))
                except (ValueError, msgspec.MsgspecError):
                    continue
    except sqlite3.Error as error:
        raise KvscopeError(f"the conversations were not read: {error}") from error

"""Where the list of recordings is kept, and how a command without a window adds to it. No Qt."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path


def library_folder() -> Path:
    """In the person's data folder."""
    data = os.environ.get("XDG_DATA_HOME", "")
    parent = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return parent / "kvscope" / "recordings"


def note_paths(paths: Iterable[Path]) -> None:
    """List recordings that were written; what is in them is looked at when somebody looks. Never in the way."""
    from kvscope_app.library.store import LibraryStore

    with contextlib.suppress(OSError, sqlite3.Error, RuntimeError):
        store = LibraryStore(library_folder())
        try:
            for path in paths:
                store.note(path)
        finally:
            store.close()

"""Results that an earlier process computed, stored as small JSON files in the cache folder.

Each entry stores the identity under which it was written: a text of everything that the result depends on. An entry
is replaced as a whole, so that processes which start concurrently never read a partial one; the last writer wins.
Must not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvscope_engine.cache_folder import cache_folder
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.whole_file import write_whole

CHECK_AGAIN: Final = "KVSCOPE_CHECK_AGAIN"
"""Name of the environment variable that, if not empty, makes this process ignore and replace all entries."""
MAX_ENTRIES: Final = 128
"""Entries per kind. Writing another one removes those that were written first."""


def read_entry(kind: str, identity: str, report: Callable[[str], None] = lambda line: None) -> Any:
    """Return the value stored for `identity`; None if there is none, or if it is damaged, which is reported in one
    line.
    """
    if os.environ.get(CHECK_AGAIN):
        return None
    try:
        path = _path(kind, identity)
        content = path.read_bytes()
    except (OSError, KvscopeError):
        return None
    try:
        entry = json.loads(content)
        stored = entry["identity"], entry["value"]
    except (ValueError, RecursionError, TypeError, KeyError):
        report(f"the cache file {str(path)!r} was damaged and is written again")
        return None
    return stored[1] if stored[0] == identity else None


def write_entry(kind: str, identity: str, value: Any) -> None:
    """Store `value`, any JSON value. A cache folder that cannot be written is ignored: the next start computes the
    value again.
    """
    with contextlib.suppress(OSError, KvscopeError):
        path = _path(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"identity": identity, "value": value}).encode())
        _remove_oldest(path.parent)


def _path(kind: str, identity: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _remove_oldest(folder: Path) -> None:
    entries = list(folder.glob("*.json"))
    if len(entries) <= MAX_ENTRIES:
        return
    for path in sorted(entries, key=lambda path: path.stat().st_mtime_ns)[:-MAX_ENTRIES]:
        path.unlink(missing_ok=True)

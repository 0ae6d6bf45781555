"""Computes SHA-256 of files, cached so that a large unchanged file is not read at each start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path, stamps: Path) -> str:
    """Return the SHA-256 of `path`, cached in the folder `stamps` while the file's size, modification time and inode
    are unchanged.
    """
    stamp = stamps / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.json"
    status = path.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ino]
    cached = _read_stamp(stamp)
    if cached is not None and cached[:-1] == identity:
        return str(cached[-1])
    digest = sha256_of(path)
    _write_stamp(stamp, [*identity, digest])
    return digest


def _read_stamp(stamp: Path) -> list[int | str] | None:
    try:
        cached = json.loads(stamp.read_bytes())
    except (OSError, ValueError):
        return None
    return cached if isinstance(cached, list) and len(cached) == 4 else None


def _write_stamp(stamp: Path, value: list[int | str]) -> None:
    """Write the cache entry and ignore errors. Without the entry, the SHA-256 is computed again at the next start."""
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=stamp.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, stamp)

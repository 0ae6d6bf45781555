"""SHA-256 of files, cached so that a large unchanged file is not read at each start."""

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


def remembered_sha256(path: Path, stamps: Path) -> str:
    """Return the digest of `path`, cached in the folder `stamps` while its size, modification time and inode are
    unchanged.
    """
    stamp = stamps / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.json"
    status = path.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ino]
    known = _read(stamp)
    if known is not None and known[:-1] == identity:
        return str(known[-1])
    digest = sha256_of(path)
    _write(stamp, [*identity, digest])
    return digest


def _read(stamp: Path) -> list[int | str] | None:
    try:
        known = json.loads(stamp.read_bytes())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, list) and len(known) == 4 else None


def _write(stamp: Path, value: list[int | str]) -> None:
    """Write the cache entry, ignoring errors: without it, the file is read again at the next start."""
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=stamp.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, stamp)

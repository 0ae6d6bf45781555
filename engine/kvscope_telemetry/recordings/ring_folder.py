"""The folder of a ring: its lock and its segments.

Owns the names of the segments and the lock. The lock is an flock, which the system releases when the process ends, even
if it is killed. Must not depend on messages.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.credentials.private_files import make_private_folder
from kvscope_telemetry.errors import BadInput

LOCK_NAME: Final = "lock"
_SEGMENT: Final = re.compile(r"(\d{6,12})\.mcap(\.part)?")


class RingFolder:
    """Exclusive lock on `folder` (created with mode 0700 if missing), until `release` or the end of the process.

    Raises BadInput, with a one-line message, if the folder is not writable, is locked by another process, or contains
    an earlier ring.
    """

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder, "ring folder")
        self.path = folder
        self._lock: int | None = hold(folder, make=True)
        if segments_in(folder):
            self.release()
            raise BadInput(f"ring folder {folder} is not accepted: there is a ring in it already; choose another")

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def delete(self) -> None:
        delete_ring(self.path)
        self.release()


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of complete segment `number`, counted from 1."""
    return folder / f"{number:06}.mcap"


def segments_in(folder: Path) -> dict[int, Path]:
    """Return the files of all segments by number, in order; empty if the folder cannot be read."""
    found: dict[int, Path] = {}
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)  # a complete file sorts before its `.part`
    except OSError:
        return found
    for name in names:
        match = _SEGMENT.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), folder / name)
    return dict(sorted(found.items()))


def hold(folder: Path, *, make: bool = False) -> int:
    """Lock `folder` and return the lock's file descriptor. Closing the descriptor releases the lock. Raises
    BadInput on failure.
    """
    flags = operating_system.LOCK_FILE_FLAGS | (os.O_CREAT if make else 0)
    lock: int | None = None
    try:
        lock = os.open(folder / LOCK_NAME, flags, 0o600)
        operating_system.lock(lock, wait=False)
    except BlockingIOError:
        os.close(lock) if lock is not None else None
        raise BadInput(f"ring folder {folder} is not accepted: another process is writing to it") from None
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise BadInput(f"ring folder {folder} is not accepted: {error.strerror}") from None
    return lock


def is_held(folder: Path) -> bool:
    try:
        with (folder / LOCK_NAME).open("rb") as lock:
            return operating_system.is_locked(lock.fileno())
    except OSError:
        return False


def delete_ring(folder: Path) -> None:
    """Delete the files that a ring wrote into `folder`. Files that cannot be deleted stay."""
    for number in segments_in(folder):
        path = segment_path(folder, number)
        for name in (path, path.with_name(path.name + ".part")):
            with contextlib.suppress(OSError):
                name.unlink()
    for leave in ((folder / LOCK_NAME).unlink, folder.rmdir):
        with contextlib.suppress(OSError):
            leave()

"""Writes a file completely or not at all. An earlier regular file is replaced, but never anything else.

As root, replacing `/dev/full` would remove the device for the whole machine. For files that must not replace anything,
see `exports.new_file`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """Return a text for the file type in `mode` (`st_mode`), such as "a folder" or "a device". Not for regular
    files.
    """
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "no plain file")


def require_regular(path: Path) -> None:
    """Raise OSError, with a text for the user, if `path` exists and is not a regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a file", str(path))


def replace_file(part: Path, path: Path) -> None:
    """Rename `part` to `path`. Raises OSError, with a text for the user, if `path` exists and is not a regular file."""
    require_regular(path)
    operating_system.rename(part, path)


def write_whole(path: Path, data: bytes, *, private: bool = False, sync: bool = False) -> None:
    """Write `data` to `path`. Readers see the earlier file or the new one, never a partial one.

    Only the user may read a `private` file. With `sync`, the data is on disk before the file replaces the earlier one.
    If OSError is raised, `path` is unchanged.
    """
    require_regular(path)
    part = path.with_name(f".kvscope-{secrets.token_hex(8)}.part")
    descriptor = os.open(part, operating_system.NEW_FILE_FLAGS, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        replace_file(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise

"""Opening a file that somebody names: a plain file and nothing that could be waited at. Knows no format."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry.errors import BadInput

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_BLOCK_BYTES: Final = 512
"""What `st_blocks` counts, whatever the file system."""


def open_regular(path: Path) -> BinaryIO:
    """`path` for reading. Raises BadInput at once, without waiting, for what is not there or is no plain file."""
    try:
        # Without O_NONBLOCK the open of a pipe waits for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise BadInput(f"recording {str(path)!r} cannot be read: {_why(path, error)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise BadInput(f"recording {str(path)!r} cannot be read: it is {_kind(mode)}, and a file is accepted")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def stored_bytes(file: BinaryIO) -> int:
    """How much of `file` is on the disk: the holes of a sparse one are not counted."""
    status = os.fstat(file.fileno())
    return min(status.st_size, _BLOCK_BYTES * status.st_blocks)


def _why(path: Path, error: OSError | ValueError) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):  # a socket cannot be opened at all
        return f"it is {_kind(mode)}, and a file is accepted"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _kind(mode: int) -> str:
    return next((words for test, words in _KINDS if test(mode)), "no plain file")

"""Opens files named by the user without blocking on pipes or devices, and follows a recording when its writer renames
it.

Must not depend on a file format.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.layout import PART_SUFFIX
from kvscope_telemetry.whole_file import kind_of

_MAX_LOCK_ATTEMPTS: Final = 900
"""Maximum number of attempts to lock a file for writing.

A reader that checks for a writer locks the file for microseconds, or far longer on a busy machine, so a single attempt
may fail. Without the writer's lock, readers would treat the file as truncated and not follow it.
"""
_LOCK_RETRY_S: Final = 0.001


def open_regular(path: Path) -> BinaryIO:
    """Open `path` for reading. Raises BadInput without blocking if it does not exist or is not a regular file."""
    try:
        descriptor = os.open(path, operating_system.READ_WITHOUT_BLOCKING)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise BadInput(f"recording {str(path)!r} cannot be read: {_open_error(path, error)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise BadInput(f"recording {str(path)!r} cannot be read: it is {kind_of(mode)}, not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def stored_bytes(file: BinaryIO) -> int:
    """Return the bytes that `file` occupies on disk, at most its size. Holes of a sparse file are not counted."""
    return operating_system.stored_bytes(os.fstat(file.fileno()))


def hold_for_writing(file: BinaryIO) -> None:
    """Lock `file` until it is closed or the process ends, so that readers know that it may grow."""
    with contextlib.suppress(OSError):  # a file system without locks: readers cannot know
        for _ in range(_MAX_LOCK_ATTEMPTS):
            try:
                operating_system.lock(file.fileno(), wait=False)
            except BlockingIOError:  # a reader is checking for a writer (`FollowedFile.is_written`)
                time.sleep(_LOCK_RETRY_S)
            else:
                return


class FollowedFile:
    """A file at `path`, or at that name without `.part` once its writer has completed it. The file is not open
    between calls.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._num_bytes = 0

    @property
    def is_deleted(self) -> bool:
        return not any(name.exists() for name in self._names)

    def open(self) -> BinaryIO:
        """Open the file under its current name (see `open_regular`). Raises BadInput if a different file has
        the final name.
        """
        try:
            return open_regular(self.path)
        except BadInput:
            if len(self._names) == 1 or self.path.exists():
                raise
        file = open_regular(self._names[-1])
        if self._identity not in (None, _identity(file)):
            file.close()
            raise BadInput(f"recording {str(self.path)!r} cannot be read: the file was replaced")
        self.path = self._names[-1]
        return file

    def is_written(self) -> bool:
        """Whether a writer has locked the file (`hold_for_writing`)."""
        try:
            with self.open() as file:
                return operating_system.is_locked(file.fileno())
        except OSError:  # a file system without locks
            return False

    def remember_size(self, file: BinaryIO) -> None:
        """Store the current size and identity of `file` for later calls of `has_grown` and `open`."""
        self._identity, self._num_bytes = _identity(file), os.fstat(file.fileno()).st_size

    def has_grown(self) -> bool:
        with self.open() as file:
            return os.fstat(file.fileno()).st_size > self._num_bytes

    @property
    def _names(self) -> tuple[Path, ...]:
        return (self.path, self.path.with_suffix("")) if self.path.suffix == PART_SUFFIX else (self.path,)


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _open_error(path: Path, error: OSError | ValueError) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):  # a socket cannot be opened at all
        return f"it is {kind_of(mode)}, not a file"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

"""Writes an export file, which appears only when it is complete.

The file is written as `name.part`, and nothing is overwritten. Standard output and named pipes are written directly.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput, KvscopeError

PART_SUFFIX: Final = ".part"
_STDOUT: Final = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def is_stream(path: Path) -> bool:
    """Whether `path` is standard output (`-` or `/dev/stdout`) or a named pipe."""
    if str(path) in _STDOUT:
        return True
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing: a new file, which is removed if the caller fails, or a stream (`is_stream`).

    Raises:
        BadInput: The path cannot be written or exists.
        KvscopeError: The disk is full.
        BrokenPipeError: The reader of a stream is gone.
    """
    if is_stream(path):
        yield from _stream(path)
        return
    part = path.with_name(path.name + PART_SUFFIX)
    if os.path.lexists(path):  # too long a name does not exist here, and fails when it is opened
        raise BadInput(f"{str(path)!r} already exists: choose another name, or move it")
    try:
        file = part.open("xb")
    except FileExistsError:
        raise BadInput(f"{str(part)!r} already exists: move it, or choose another name") from None
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
        operating_system.rename(part, path)
    except OSError as error:
        raise KvscopeError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _stream(path: Path) -> Iterator[BinaryIO]:
    try:
        is_stdout = str(path) in _STDOUT  # by its number: sys.stdout is None if the shell closed it
        descriptor = os.dup(1) if is_stdout else os.open(path, os.O_WRONLY)
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be written: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        yield file

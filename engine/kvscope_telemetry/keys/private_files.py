"""Files and folders for this user alone, written whole or not at all. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.whole_file import replace_file

MAX_BYTES = 1 << 20
"""More than any file of ours has."""


def make_private_folder(folder: Path, what: str) -> None:
    """Make `folder` (mode 0700) if it is not there. Raises BadInput when others could get in."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BadInput(f"{what} {folder} is not accepted: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise BadInput(f"{what} {folder} is not accepted: it is not a directory")
    if status.st_uid != os.geteuid():
        raise BadInput(f"{what} {folder} is not accepted: it belongs to another user")
    if status.st_mode & 0o077:
        raise BadInput(f"{what} {folder} is not accepted: others can read it (fix: chmod 700)")


def write_private(path: Path, text: str, what: str, *, replace: bool = True) -> None:
    """Write `path` (mode 0600) so that a reader sees the old file or the new one, never a part.

    Raises BadInput when it cannot be written, and, without `replace`, when it is there already.
    """
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            replace_file(Path(temporary), path)
        else:
            os.link(temporary, path)
            os.unlink(temporary)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise BadInput(f"{what} {path} cannot be written: {error.strerror}") from None


def write_config(path: Path, text: str, what: str) -> None:
    """The same in a folder that is made where it is not there yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be written: {error.strerror}") from None
    write_private(path, text, what)


def toml_text(text: str) -> str:
    """A basic string of TOML; JSON's escapes are TOML's, but for DEL."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def read_private(path: Path, what: str) -> str:
    """The text of `path`. Raises BadInput for what is no plain small file of this user's, closed to others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not hold us up
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"{what} {path} is not accepted: it is not a plain file")
            if status.st_mode & 0o077:
                raise BadInput(f"{what} {path} is not accepted: others can read it (fix: chmod 600)")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(f"{what} {path} is not accepted: it has more than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what} {path} is not accepted: it is not text") from None

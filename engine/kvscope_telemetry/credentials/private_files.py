"""Reads and writes files and directories that only this user can access. Writes are atomic. Independent of
their contents.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.whole_file import replace_file

MAX_BYTES = 1 << 20
"""Maximum size in bytes of a file that is read. kvscope never writes larger ones."""


def make_private_folder(folder: Path, what: str) -> None:
    """Create `folder` (mode 0700) if it does not exist. Raises BadInput if other users can access it.

    `what` describes the folder in the error text, here and in the other functions of this module.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BadInput(f"{what} {folder} is not accepted: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise BadInput(f"{what} {folder} is a file: give a folder")
    if not operating_system.is_own(status):
        raise BadInput(f"{what} {folder} is not accepted: it belongs to another user")
    if not operating_system.is_private(status):
        raise BadInput(f"{what} {folder} is not accepted: others can read it (fix: chmod 700)")


def write_private(path: Path, text: str, what: str, *, replace: bool = True) -> None:
    """Write `path` (mode 0600) atomically: readers see either the old file or the new one.

    Raises BadInput if it cannot be written, or if it exists and `replace` is False.
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
    """Write `path` as `write_private` does, creating its directory if necessary."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be written: {error.strerror}") from None
    write_private(path, text, what)


def toml_text(text: str) -> str:
    """Return `text` as a basic TOML string: JSON's escapes are valid in TOML, and DEL is escaped additionally."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def read_private(path: Path, what: str) -> str:
    """Return the text in `path`. Raises BadInput unless it is a regular file of at most `MAX_BYTES` that other
    users cannot access.
    """
    try:
        descriptor = os.open(path, operating_system.READ_WITHOUT_BLOCKING)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"{what} {path} is not accepted: it is not a plain file")
            if not operating_system.is_private(status):
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

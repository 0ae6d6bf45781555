"""Writes a file that appears only when it is complete: it is written as `name.part`, and nothing is ever
overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry.errors import BadInput, KvscopeError

PART_SUFFIX: Final = ".part"


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """To write `path` into. Raises BadInput for a path that will not do, KvscopeError for a disk that is full; then
    nothing is left of it."""
    part = path.with_name(path.name + PART_SUFFIX)
    if path.exists():
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
        part.rename(path)
    except OSError as error:
        raise KvscopeError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()

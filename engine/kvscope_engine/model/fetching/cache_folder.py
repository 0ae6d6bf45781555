"""Where downloaded and converted models are kept, and how several engines that start at once share it.

Whatever is put there is built in a temporary folder beside its place and renamed: half a file is never seen.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvscope_telemetry.errors import KvscopeError


def cache_folder() -> Path:
    """`$KVSCOPE_CACHE`, or `kvscope` in `$XDG_CACHE_HOME` or `~/.cache`. Made when missing."""
    own = os.environ.get("KVSCOPE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(own) if own else Path(base) / "kvscope"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvscopeError(
            f"cannot make the cache folder {str(folder)!r}: {error.strerror}; KVSCOPE_CACHE names another"
        ) from error
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; others that want it wait. The lock of a process that died is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder on the same file system as `parent`; gone at the end with what is left in it."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, place: Path) -> None:
    """Put the folder `new` where `place` is; what was there goes. Call with the lock of `place` held."""
    if place.exists():
        shutil.rmtree(place)
    os.rename(new, place)

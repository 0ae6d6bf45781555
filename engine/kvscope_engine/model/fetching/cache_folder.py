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
            f"cannot create the cache folder {str(folder)!r}: {error.strerror}; set KVSCOPE_CACHE to another"
        ) from error
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; others that want it wait. The lock of a process that died is free.

    Raises KvscopeError, naming the lock file, when there can be none.
    """
    lock = path.with_name(f"{path.name}.lock")
    fd = _opened_lock(lock)
    try:
        with errors_named(lock):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder on the same file system as `parent`; gone at the end with what is left in it."""
    with errors_named(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """What the file system refuses inside is a KvscopeError that names `path` and what can be done."""
    try:
        yield
    except OSError as error:
        raise KvscopeError(
            f"cannot use {str(path)!r} in the cache: {error.strerror or error}; free space or fix "
            "permissions there, or set KVSCOPE_CACHE to another folder"
        ) from error


def _opened_lock(lock: Path) -> int:
    """Never waits for who reads a pipe, and never follows a link out of the cache."""
    with errors_named(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        if lock.is_symlink() or (lock.exists() and not lock.is_file()):
            raise KvscopeError(f"{str(lock)!r} is not a regular file and cannot be a lock: remove it and start again")
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def replace_folder(new: Path, place: Path) -> None:
    """Put the folder `new` where `place` is; what was there goes. Call with the lock of `place` held."""
    if place.exists():
        shutil.rmtree(place)
    os.rename(new, place)

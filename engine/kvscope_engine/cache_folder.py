"""Where downloaded and converted models are kept, and how several engines that start at once share it.

Whatever is put there is built in a temporary folder beside its place and renamed: half a file is never seen.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError

_SCRATCH: Final = "tmp-"


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
    """Make a new folder in `parent`, and remove it with its content at the end.

    Folders that killed processes left in `parent` are removed as well. The lock on a folder tells whether its process
    lives: the kernel releases it when that process ends, however it ends.
    """
    with errors_named(parent):
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent):  # or another process could remove the new folder before it is locked
            _remove_abandoned(parent)
            folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # in use, another user's, or gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


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

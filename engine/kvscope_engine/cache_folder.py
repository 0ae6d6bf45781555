"""Folder of downloaded and converted models, shared by engines that start concurrently.

Writers create a temporary folder next to the target and rename it, so that partial files are never visible.
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

_SCRATCH_PREFIX: Final = "tmp-"


def cache_folder() -> Path:
    """Return `$KVSCOPE_CACHE`, or `kvscope` in `$XDG_CACHE_HOME` or `~/.cache`. Creates it if missing."""
    configured = os.environ.get("KVSCOPE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(configured) if configured else Path(base) / "kvscope"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvscopeError(
            f"cannot create the cache folder {str(folder)!r}: {error.strerror}; set KVSCOPE_CACHE to another"
        ) from error
    return folder


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `PATH.lock`, and wait while another process holds it. The kernel releases the lock of a
    process that ended.

    Raises KvscopeError, naming the lock file, if the file cannot be created or locked.
    """
    lock = path.with_name(f"{path.name}.lock")
    fd = _open_lock_file(lock)
    try:
        with convert_os_errors(lock):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent`, and remove it with its contents when the context exits.

    Folders that killed processes left in `parent` are removed as well. Each folder is locked while its process lives;
    the kernel releases the lock when the process ends.
    """
    with convert_os_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent):  # otherwise another process could remove the new folder before it is locked
            _remove_abandoned_folders(parent)
            folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=parent))
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


def _remove_abandoned_folders(parent: Path) -> None:
    for folder in parent.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextmanager
def convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a KvscopeError that names `path` and suggests a remedy."""
    try:
        yield
    except OSError as error:
        raise KvscopeError(
            f"cannot use {str(path)!r} in the cache: {error.strerror or error}; free space on this disk, fix the "
            "folder's permissions, or set KVSCOPE_CACHE to another folder"
        ) from error


def _open_lock_file(lock: Path) -> int:
    """Open the lock file. Does not block if it is a pipe, and does not follow a symbolic link."""
    with convert_os_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        if lock.is_symlink() or (lock.exists() and not lock.is_file()):
            raise KvscopeError(f"{str(lock)!r} is not a regular file and cannot be a lock: remove it and start again")
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def replace_folder(source: Path, target: Path) -> None:
    """Rename the folder `source` to `target`, replacing an existing folder. The caller holds the lock of `target`."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(source, target)

"""Opens the file of the disk tier: locked, fully allocated from the start, and with direct I/O if possible.

Raises BadInput for files that cannot be used. Must not depend on the format of the file's contents.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_engine.cache_folder import cache_folder
from kvscope_engine.model.kv_cache.kv_storage import MIB
from kvscope_telemetry.errors import BadInput

SECTOR_BYTES: Final = 4096
"""Alignment in bytes of offsets, sizes and addresses for direct I/O; the largest that current drives require."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A locked file with all its space allocated."""

    fd: int
    path: Path | None
    """Path of the file; None if it has no name, so that it disappears with the process."""
    is_direct: bool
    """Whether reads and writes bypass the page cache."""
    previous_bytes: int
    """Size of the file before it was opened."""

    def is_at_path(self) -> bool:
        """Whether the path still refers to this file. Always True for a file without a name."""
        if self.path is None:
            return True
        try:
            at_path, opened = os.stat(self.path), os.fstat(self.fd)
        except OSError:
            return False
        return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def index_path(path: Path) -> Path:
    """Return the path of the index file next to `path`. The index file also shows that kvscope created the file
    at `path`.
    """
    return path.with_name(f"{path.name}.index")


def open_disk_file(path: Path | None, num_bytes: int, *, keep: bool) -> OpenFile:
    """Open and lock the tier's file, with `num_bytes` allocated. Unless `keep` is true, the file is unlinked and
    disappears with the process.

    Raises:
        BadInput: The drive has too little space, another engine uses the file, or the file has contents that kvscope
            did not write.
    """
    is_new = path is not None and not os.path.lexists(path)
    with _naming_file(path):
        fd = _open_temporary() if path is None else os.open(path, _FLAGS, 0o600)
    try:
        previous_bytes = os.fstat(fd).st_size
        if path is not None:
            _lock_file(fd, path)
        _check_free_space(fd, path, num_bytes)
        _allocate(fd, path, num_bytes)
        if path is not None and not keep:
            _unlink(path)
        return OpenFile(fd, path if keep else None, _enable_direct_io(fd), previous_bytes)
    except BaseException:
        if path is not None and is_new:
            path.unlink(missing_ok=True)
        os.close(fd)
        raise


_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def _open_temporary() -> int:
    fd, name = tempfile.mkstemp(prefix="kv-", dir=cache_folder())
    os.unlink(name)
    return fd


def _lock_file(fd: int, path: Path) -> None:
    """Lock the file, after checking that it is empty or was created by kvscope."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"--kv-disk-path {str(path)!r} is not accepted: it is not a regular file")
    if status.st_size and not index_path(path).exists():
        raise BadInput(
            f"--kv-disk-path {str(path)!r} is not accepted: it has {status.st_size} bytes that kvscope did not write "
            f"(there is no {index_path(path).name} beside it); remove it or name another file"
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BadInput(f"--kv-disk-path {str(path)!r} is in use by another engine") from error
    with _naming_file(path):
        os.fchmod(fd, 0o600)


def _check_free_space(fd: int, path: Path | None, num_bytes: int) -> None:
    """Raise BadInput if free space or this process's limit on file sizes is too small."""
    drive, status = os.fstatvfs(fd), os.fstat(fd)
    free = drive.f_bavail * drive.f_frsize + 512 * status.st_blocks
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if num_bytes > free:
        raise BadInput(_too_large(path, num_bytes, f"{free / MIB:.0f} MiB are free"))
    if limit != resource.RLIM_INFINITY and num_bytes > limit:
        raise BadInput(_too_large(path, num_bytes, f"the limit on file sizes is {limit / MIB:.0f} MiB (ulimit -f)"))


def _allocate(fd: int, path: Path | None, num_bytes: int) -> None:
    with _naming_file(path, num_bytes):
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)


def _too_large(path: Path | None, num_bytes: int, limit: str) -> str:
    return f"--kv-disk asks for {num_bytes / MIB:.0f} MiB in {_name(path)}: {limit}"


def _unlink(path: Path) -> None:
    """Unlink the file, so that it disappears even if the process is killed. Also unlink the index that an
    earlier run wrote.
    """
    path.unlink(missing_ok=True)
    index_path(path).unlink(missing_ok=True)


def _enable_direct_io(fd: int) -> bool:
    """Enable direct I/O and test it; some file systems refuse the flag, some the first read."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        with mmap.mmap(-1, SECTOR_BYTES) as page:
            os.preadv(fd, [page], 0)
        return hasattr(os, "O_DIRECT")
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False


def _name(path: Path | None) -> str:
    return repr(str(path)) if path is not None else f"a temporary file in {str(cache_folder())!r}"


@contextmanager
def _naming_file(path: Path | None, num_bytes: int | None = None) -> Iterator[None]:
    """Return a context that converts an OSError to a BadInput that names the file."""
    try:
        yield
    except OSError as error:
        size = "" if num_bytes is None else f" of {num_bytes / MIB:.0f} MiB"
        raise BadInput(f"cannot make the KV cache's file{size} at {_name(path)}: {error.strerror}") from error

"""Ensures one engine per endpoint: the private directory of `ipc://` sockets, their files, and the engine's lock.

A second bind to an ipc path would silently take it over, so the lock is acquired first. It is an flock: the kernel
releases the lock of a killed engine, and a remaining file has no effect. Must not depend on sockets.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput, EndpointInUse

LOCK_NAME = "lock"
_SCHEME: Final = "ipc://"


class EndpointLock:
    """Exclusive lock on a directory, from construction to `release` or the end of the process.

    The directory itself is locked. A file in it contains the process id of the holder and may be deleted. The file is
    locked, too, because older versions of the engine check only the lock of the file.

    Raises BadInput for a directory that other users could tamper with, EndpointInUse if the directory is locked.
    """

    def __init__(self, folder: Path, endpoint: str) -> None:
        _private_folder(folder, endpoint)
        self._held: list[int] = []
        try:
            self._hold(operating_system.open_for_lock(folder))
            file = self._hold(os.open(folder / LOCK_NAME, operating_system.LOCK_FILE_FLAGS | os.O_CREAT, 0o600))
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise BadInput(f"endpoint {endpoint} is not accepted: {folder / LOCK_NAME} is not a plain file")
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            self.release()
            raise EndpointInUse(
                f"endpoint {endpoint} is in use by another engine (pid {_holder(folder)}): stop it, or choose another"
            ) from None
        except OSError as error:
            self.release()
            raise BadInput(
                f"endpoint {endpoint} is not accepted: {error.filename or folder}: {error.strerror}"
            ) from None
        except BadInput:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. The file is not deleted, because another engine may already have opened it."""
        while self._held:
            os.close(self._held.pop())

    def _hold(self, descriptor: int) -> int:
        self._held.append(descriptor)
        operating_system.lock(descriptor, wait=False)
        return descriptor


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Set the umask inside the context, so that new files and sockets are accessible to this user only.

    The umask applies to the whole process, so the context should be short.
    """
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def _holder(folder: Path) -> str:
    try:
        with (folder / LOCK_NAME).open(errors="replace") as file:
            return file.read(32).strip() or "unknown"
    except OSError:
        return "unknown"


def _private_folder(folder: Path, endpoint: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
        open_parent = next((p for p in folder.resolve().parents if _is_open_to_all(p)), None)
    except OSError as error:
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder} is not a directory")
    if not operating_system.is_own(status):
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder} belongs to another user")
    if status.st_mode & 0o022:
        raise BadInput(f"endpoint {endpoint} is not accepted: others can write to {folder} (fix: chmod 700)")
    if open_parent is not None:
        raise BadInput(
            f"endpoint {endpoint} is not accepted: others can replace files in {open_parent} (fix: chmod +t)"
        )
    if folder.resolve().parent == Path("/") and status.st_mode & 0o077:
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder} is the system's; choose a directory of your own")


def _is_open_to_all(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


class SocketFiles:
    """Files of bound `ipc://` sockets, which ZeroMQ does not delete when it closes the sockets."""

    def __init__(self) -> None:
        self._inodes: dict[Path, int] = {}

    def record_bound_file(self, endpoint: str) -> None:
        """Record the file of a socket that was just bound to `endpoint`; a tcp endpoint has no file."""
        if endpoint.startswith(_SCHEME):
            path = Path(endpoint.removeprefix(_SCHEME))
            with contextlib.suppress(OSError):  # an abstract socket address has no file
                self._inodes[path] = path.stat().st_ino

    def remove(self) -> None:
        """Delete the files after the sockets were closed. A file that has replaced the original one is not deleted."""
        while self._inodes:
            path, inode = self._inodes.popitem()
            with contextlib.suppress(OSError):
                if path.is_socket() and path.stat().st_ino == inode:
                    path.unlink()

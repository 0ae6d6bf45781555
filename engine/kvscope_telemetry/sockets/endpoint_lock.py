"""One engine an endpoint: the private directory of `ipc://` sockets, and the lock held for the engine's life.

A second bind on an ipc path would silently take it over, so the lock comes first. It is an flock: a killed
engine's is gone with it, and the file that stays behind is no obstacle. Knows no sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvscope_telemetry.errors import BadInput, EndpointInUse

LOCK_NAME = "lock"


class EndpointLock:
    """Exclusive hold on a directory, from construction to `release` or the end of the process.

    Raises BadInput for a directory that others could tamper with, EndpointInUse when it is held.
    """

    def __init__(self, folder: Path, endpoint: str) -> None:
        _private_folder(folder, endpoint)
        self._file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            message = f"endpoint {endpoint} is in use by another engine (pid {holder}): stop it, or choose another"
            raise EndpointInUse(message) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next engine in. The file stays: removing it could pull it away from under a newcomer."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Files and sockets made inside are for this user alone. Process-wide: keep it short."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def _private_folder(folder: Path, endpoint: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder} is not a directory")
    if status.st_uid != os.geteuid():
        raise BadInput(f"endpoint {endpoint} is not accepted: {folder} belongs to another user")
    if status.st_mode & 0o022:
        raise BadInput(f"endpoint {endpoint} is not accepted: others may write to {folder} (chmod 700 mends it)")

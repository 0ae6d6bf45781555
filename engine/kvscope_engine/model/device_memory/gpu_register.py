"""Serializes the memory allocation of one user's engines on a GPU, and publishes the bytes that each has yet to
allocate.

Owns the lock files: one per GPU, locked while an engine allocates its memory, and one per engine and GPU, locked as
long as the engine lives, with the bytes that it planned for steps and has not allocated. The system releases the locks
of a killed process. If files are unavailable, an engine continues without them and only measures the memory of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvscope_telemetry.operating_system import shared_folder

MAX_WAIT_S: Final = 600.0
"""Maximum seconds to wait for another engine to load, because one that is stopped or hangs must not block others
forever.
"""
_POLL_S: Final = 0.2
_MAX_ENTRY_CHARS: Final = 32


class GpuRegister:
    """Lock files of this engine for the GPUs that it computes on. Call `await_turn` first."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._turn_locks: list[int] = []
        self._entries: dict[Path, int] = {}
        self._published_bytes = 0

    def await_turn(
        self,
        uuids: Sequence[str],
        report_waiting: Callable[[str], object],
        max_wait_s: float = MAX_WAIT_S,
        sleep: Callable[[float], object] = time.sleep,
    ) -> bool:
        """Wait until no other engine is allocating memory of these GPUs. Returns False on a timeout.

        `report_waiting` is called with a text that names the engine waited for. The turn lasts until `end_turn` or the
        end of the process.
        """
        self.end_turn()
        if not _is_private_folder(self._folder, create=True):
            return True
        deadline_s = time.monotonic() + max_wait_s
        turns = [
            self._await_turn(uuid, report_waiting, deadline_s, sleep) for uuid in sorted(uuids)
        ]  # in sorted order, so that two engines cannot deadlock
        for uuid in uuids:
            path = self._folder / f"{_file_name(uuid)}.{os.getpid()}"
            entry = _locked(path)
            if entry is not None and entry >= 0:
                self._entries[path] = entry
                _write(entry, 0)
        return all(turns)

    def end_turn(self) -> None:
        """Let the next engine plan and allocate. Call it once this engine has allocated its memory."""
        while self._turn_locks:
            _release_lock(self._turn_locks.pop())

    def publish(self, num_bytes: int) -> None:
        """Publish the bytes per GPU that are planned for steps and not allocated yet."""
        if num_bytes != self._published_bytes:
            self._published_bytes = num_bytes
            for entry in self._entries.values():
                _write(entry, num_bytes)

    def close(self) -> None:
        self.end_turn()
        while self._entries:
            path, entry = self._entries.popitem()
            with contextlib.suppress(OSError):
                path.unlink()
            _release_lock(entry)

    def _await_turn(
        self, uuid: str, report_waiting: Callable[[str], object], deadline_s: float, sleep: Callable[[float], object]
    ) -> bool:
        path = self._folder / f"{_file_name(uuid)}.turn"
        is_reported = False
        while (turn := _locked(path)) is None:
            if not is_reported:
                is_reported = True
                report_waiting(f"for another kvscope engine{_lock_owner(path)}, which takes memory of the same GPU")
            if time.monotonic() >= deadline_s:
                return False
            sleep(_POLL_S)
        if turn >= 0:
            self._turn_locks.append(turn)
            _write(turn, os.getpid())
        return True


def promised_bytes(uuid: str, folder: Path | None = None) -> int:
    """Return the bytes that other engines of this user have yet to allocate on a GPU."""
    folder = folder or default_folder()
    return sum(n for pid, n in _entries(folder, uuid) if pid != os.getpid()) if _is_private_folder(folder) else 0


def default_folder() -> Path:
    """Return the user's folder for lock files, the same for every engine of a machine or container."""
    return shared_folder() / "gpus"


def _is_private_folder(folder: Path, *, create: bool = False) -> bool:
    """Whether the folder exists, and neither it nor its parent is writable by another user. `create` makes missing
    folders.
    """
    try:
        for path in (folder.parent, folder):
            if create:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
    except OSError:
        return False
    return True


def _release_lock(descriptor: int) -> None:
    """Unlock and close a file. Closing alone is not enough if a forked child has inherited the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _entries(folder: Path, uuid: str) -> Iterator[tuple[int, int]]:
    """Yield (process id, published bytes) of each engine that is alive, and delete the files of dead engines."""
    for path in sorted(folder.glob(f"{_file_name(uuid)}.*")) if uuid else ():
        pid = path.name.rpartition(".")[2]
        if not (pid.isascii() and pid.isdigit()):
            continue
        lock = _locked(path) if int(pid) != os.getpid() else None
        if lock is None:
            with contextlib.suppress(OSError, ValueError):
                yield int(pid), int(path.read_text()[:_MAX_ENTRY_CHARS])
        elif lock >= 0:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(lock)


def _locked(path: Path) -> int | None:
    """Open and lock a file. Returns its descriptor; None if another process holds the lock; -1 if the file is
    unavailable.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _write(descriptor: int, number: int) -> None:
    with contextlib.suppress(OSError):  # disk full: other engines do not learn the promise
        os.pwrite(descriptor, f"{number:<{_MAX_ENTRY_CHARS - 1}}\n".encode(), 0)


def _lock_owner(path: Path) -> str:
    try:
        pid = path.read_text()[:_MAX_ENTRY_CHARS].strip()
    except OSError:
        return ""
    return f" (pid {pid})" if pid.isdigit() else ""


def _file_name(uuid: str) -> str:
    return uuid.replace("/", "_")

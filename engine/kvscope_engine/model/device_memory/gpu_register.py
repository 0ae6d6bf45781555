"""Has the engines of one user on a GPU take its memory one after another, and tells each what others have yet to take.

Owns the files: for each GPU one that is locked while an engine takes its memory, and for each engine one, locked as
long as it lives, with the bytes that it planned for steps and has not taken. Locks are gone with a killed process.
Where files cannot be had an engine goes on without them: it only measures what others take meanwhile.
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

from kvscope_telemetry.sockets.bind_address import shared_folder

MAX_WAIT_S: Final = 600.0
"""For another engine to load. One that is stopped, or hangs, keeps nobody from starting."""
_POLL_S: Final = 0.2
_MAX_ENTRY: Final = 32


class GpuRegister:
    """This engine's part, for the GPUs that it computes on; `await_turn` comes first."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._turns: list[int] = []
        self._entries: dict[Path, int] = {}
        self._told = 0

    def await_turn(
        self,
        uuids: Sequence[str],
        tell: Callable[[str], object],
        max_wait_s: float = MAX_WAIT_S,
        sleep: Callable[[float], object] = time.sleep,
    ) -> bool:
        """Wait until no other engine takes memory of these GPUs: whether that is so. `tell` is told whom it waits for.

        The turn lasts until `end_turn`, or the end of the process.
        """
        self.end_turn()
        if not _is_ours(self._folder, make=True):
            return True
        deadline_s = time.monotonic() + max_wait_s
        turns = [self._turn(uuid, tell, deadline_s, sleep) for uuid in sorted(uuids)]  # no two wait for each other
        for uuid in uuids:
            path = self._folder / f"{_file_name(uuid)}.{os.getpid()}"
            entry = _locked(path)
            if entry is not None and entry >= 0:
                self._entries[path] = entry
                _write(entry, 0)
        return all(turns)

    def end_turn(self) -> None:
        """The memory is taken: the next may plan."""
        while self._turns:
            _let_go(self._turns.pop())

    def promise(self, num_bytes: int) -> None:
        """So many bytes of each GPU were planned for steps and are not taken yet."""
        if num_bytes != self._told:
            self._told = num_bytes
            for entry in self._entries.values():
                _write(entry, num_bytes)

    def close(self) -> None:
        """Nothing is taken any more."""
        self.end_turn()
        while self._entries:
            path, entry = self._entries.popitem()
            with contextlib.suppress(OSError):
                path.unlink()
            _let_go(entry)

    def _turn(
        self, uuid: str, tell: Callable[[str], object], deadline_s: float, sleep: Callable[[float], object]
    ) -> bool:
        """Of one GPU, until the deadline."""
        path = self._folder / f"{_file_name(uuid)}.turn"
        is_told = False
        while (turn := _locked(path)) is None:
            if not is_told:
                is_told = True
                tell(f"for another kvscope engine{_by_whom(path)}, which takes memory of the same GPU")
            if time.monotonic() >= deadline_s:
                return False
            sleep(_POLL_S)
        if turn >= 0:
            self._turns.append(turn)
            _write(turn, os.getpid())
        return True


def promised_bytes(uuid: str, folder: Path | None = None) -> int:
    """What other engines of this user have yet to take of a GPU."""
    folder = folder or default_folder()
    return sum(n for pid, n in _entries(folder, uuid) if pid != os.getpid()) if _is_ours(folder) else 0


def default_folder() -> Path:
    """The user's own, the same for every engine of a machine or container."""
    return shared_folder() / "gpus"


def _is_ours(folder: Path, *, make: bool = False) -> bool:
    """Whether it is there, and neither it nor its parent can be written to by another user."""
    try:
        for path in (folder.parent, folder):
            if make:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
    except OSError:
        return False
    return True


def _let_go(descriptor: int) -> None:
    """Unlock it, for a forked child that has it too, and close it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _entries(folder: Path, uuid: str) -> Iterator[tuple[int, int]]:
    """Of engines that live, their process and what they promised; files of others go."""
    for path in sorted(folder.glob(f"{_file_name(uuid)}.*")) if uuid else ():
        pid = path.name.rpartition(".")[2]
        if not (pid.isascii() and pid.isdigit()):
            continue
        dead = _locked(path) if int(pid) != os.getpid() else None
        if dead is None:
            with contextlib.suppress(OSError, ValueError):
                yield int(pid), int(path.read_text()[:_MAX_ENTRY])
        elif dead >= 0:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(dead)


def _locked(path: Path) -> int | None:
    """The file, open and locked; None: another holds it, -1: it cannot be had."""
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
    with contextlib.suppress(OSError):  # a full disk: what is promised is not known
        os.pwrite(descriptor, f"{number:<{_MAX_ENTRY - 1}}\n".encode(), 0)


def _by_whom(path: Path) -> str:
    try:
        pid = path.read_text()[:_MAX_ENTRY].strip()
    except OSError:
        return ""
    return f" (pid {pid})" if pid.isdigit() else ""


def _file_name(uuid: str) -> str:
    return uuid.replace("/", "_")

"""Identifies the process that owns something, so that a later process can check whether the owner still runs. No Qt.

A process id is not enough, because ids are reused. The identity also has the process's start time, in clock ticks since
boot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_START_FIELD: Final = 19
"""Index of the start time in `/proc/PID/stat`, counted after the command name, which may contain spaces."""
_ENDED: Final = -1
"""Start time used for a zombie: the process has ended, but its parent has not waited for it yet."""


def own_identity() -> str:
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """Return the identity of a running process: `PID-START`."""
    return f"{pid}-{_start_ticks(pid)}"


def is_alive(identity: str) -> bool:
    """Return whether the process of `identity` still runs. False for an invalid identity."""
    pid, _, start = identity.partition("-")
    if not pid.isdecimal() or not start.isdecimal() or not _exists(int(pid)):
        return False
    return _start_ticks(int(pid)) == int(start)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0


def _start_ticks(pid: int) -> int:
    """Return the process's start time, or 0 where the system has no /proc; then only the process id is compared."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _ENDED if fields[0] in "ZX" else int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0

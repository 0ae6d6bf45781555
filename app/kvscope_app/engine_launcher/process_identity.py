"""Identifies processes even if their ids are reused, so that a later process can check whether an owner still runs. No
Qt.

An identity consists of the process id and the process's start time, in clock ticks since boot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_START_FIELD: Final = 19
"""Index of the start time among the fields of `/proc/PID/stat` after the command name, which may contain spaces."""
_ENDED: Final = -1
"""Start time used for a zombie: a process that has ended, but that its parent has not waited for."""


def own_identity() -> str:
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """Return the identity of a running process, `PID-START`."""
    return f"{pid}-{_start_ticks(pid)}"


def is_alive(identity: str) -> bool:
    """Whether the process of `identity` still runs. False for an invalid identity."""
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
    """Return the process's start time, or 0 on a system without /proc, where only process ids are compared."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _ENDED if fields[0] in "ZX" else int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0

"""Identifies the process that owns something, so that a later process can tell whether the owner still lives. No Qt.

A process id alone is not enough, because ids are reused. The identity also has the process's start time, in clock ticks
since boot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_START_FIELD: Final = 19
"""Of `/proc/PID/stat`, counted after the name, which may hold anything."""
_ENDED: Final = -1
"""No process began then: this one is over, only its parent has not noticed."""


def own_identity() -> str:
    """The identity of this process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """The identity of a running process: `PID-START`."""
    return f"{pid}-{_start_ticks(pid)}"


def is_alive(identity: str) -> bool:
    """Whether the process of `identity` still runs. An invalid identity belongs to no process."""
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
    """0 where the system does not tell: then the number alone must do."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _ENDED if fields[0] in "ZX" else int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0

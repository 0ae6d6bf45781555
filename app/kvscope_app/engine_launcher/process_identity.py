"""Identifies processes even if their ids are reused, so that a later process can check whether an owner still runs. No
Qt.

An identity consists of the process id and a number that is computed from the process's start time.
"""

from __future__ import annotations

import os

from kvscope_telemetry.operating_system import process_start


def own_identity() -> str:
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """Return the identity of a running process, `PID-START`."""
    return f"{pid}-{process_start(pid) or 0}"


def is_alive(identity: str) -> bool:
    """Whether the process of `identity` still runs. False for an invalid identity."""
    pid, _, start = identity.partition("-")
    if not pid.isdecimal() or not start.isdecimal() or not int(pid):
        return False
    running = process_start(int(pid))
    return running is not None and running == int(start)

"""Ends this process when its parent dies, so that a desktop killed with -9 leaves no engine behind.

A pidfd tells of the parent's end at once. PR_SET_PDEATHSIG is not used: it fires when the *thread* that
started this process ends, and a desktop may start its engine from a thread that does not live long.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Final

GRACE_S: Final = 5.0
"""How long an orderly stop may take before the process is ended for good."""
POLL_S: Final = 0.5


def watch_parent(expected_pid: int | None = None) -> None:
    """Send this process SIGTERM when its parent ends; end it outright when it is still there after `GRACE_S`.

    `expected_pid` is the parent's own word on who it is: without it, a parent that died before this call
    cannot be told from the one that adopted us.
    """
    parent = os.getppid()
    if expected_pid is not None and expected_pid != parent:
        _end()
        return
    threading.Thread(target=_watch, args=(parent,), name="kvscope-parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (OSError, AttributeError):
        while os.getppid() == parent:
            time.sleep(POLL_S)
    else:
        if os.getppid() == parent:  # else the number was already somebody else's
            select.select([descriptor], [], [])
        os.close(descriptor)
    _end()


def _end() -> None:
    last_resort = threading.Timer(GRACE_S, os._exit, args=(1,))
    last_resort.daemon = True
    last_resort.start()
    os.kill(os.getpid(), signal.SIGTERM)

"""Ends this process when its parent ends, so that a desktop killed with SIGKILL leaves no engine running.

A pidfd reports the parent's end immediately. PR_SET_PDEATHSIG is not used, because it fires when the *thread* that
started this process ends, and a desktop may start its engine from a short-lived thread.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Final

STOP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.5


def watch_parent(expected_pid: int | None = None) -> None:
    """Send this process SIGTERM when its parent ends, and exit without cleanup if it still runs after `STOP_TIMEOUT_S`.

    `expected_pid` is the parent's pid as given by the parent. Without it, a parent that died before this call cannot be
    distinguished from the process that adopted this one.
    """
    parent = os.getppid()
    if expected_pid is not None and expected_pid != parent:
        _terminate()
        return
    threading.Thread(target=_watch_parent, args=(parent,), name="kvscope-parent-watch", daemon=True).start()


def _watch_parent(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (OSError, AttributeError):
        while os.getppid() == parent:
            time.sleep(POLL_S)
    else:
        if os.getppid() == parent:  # else the pid was already reused
            select.select([descriptor], [], [])
        os.close(descriptor)
    _terminate()


def _terminate() -> None:
    last_resort = threading.Timer(STOP_TIMEOUT_S, os._exit, args=(1,))
    last_resort.daemon = True
    last_resort.start()
    os.kill(os.getpid(), signal.SIGTERM)

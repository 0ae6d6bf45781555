"""Ctrl-C while programs are still being imported: one line and the exit code, at once.

Imports pass a KeyboardInterrupt on as other errors, or not at all, and there is nothing yet that must be put away.
Imports nothing of ours, so that it can stand around the import of everything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def leaving_on_interrupt(program: str = "kvscope-engine") -> Iterator[None]:
    """Inside, Ctrl-C ends the process. Changes nothing beside the main thread, or where somebody else listens."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.stderr.write(f"{program}: interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

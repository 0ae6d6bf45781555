"""Ctrl-C while programs are still being imported: one line and the exit code, at once.

Imports pass a KeyboardInterrupt on as other errors, or not at all. The engine has its own of this: the desktop does not
import it, and what both import takes longer than a person waits before the first Ctrl-C. Imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def leaving_on_interrupt(program: str, first: Callable[[], object] | None = None) -> Iterator[None]:
    """Inside, Ctrl-C ends the process, after `first` was called; a second one waits for nothing.

    Changes nothing beside the main thread, or where somebody else listens. Who listens from inside on is left alone.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stderr.write(f"{program}: interrupted\n")
        sys.stderr.flush()
        try:
            if first is not None:
                first()
        finally:
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

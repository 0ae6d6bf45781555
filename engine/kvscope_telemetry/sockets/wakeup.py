"""A self-pipe that ends another thread's poll. Many signals before the other thread looks are one byte."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """`signal` from any thread; the thread that polls `reader` calls `clear` before it looks at its work."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._is_set = False
        self._is_closed = False
        self._lock = threading.Lock()

    def signal(self) -> None:
        """Make `reader` readable, but not after `close`. The flag spares the system call while nobody has looked."""
        if self._is_set:
            return
        with self._lock:
            if not self._is_closed:
                self._is_set = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Forget the signals so far. The flag goes last down, so a later signal always writes."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        self._is_set = False

    def close(self) -> None:
        """Give the file descriptors back. Idempotent; a signal may come at any time, also later."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.reader)
                os.close(self._writer)

"""A self-pipe that ends another thread's poll. Several signals are combined into one byte until that thread
reads it.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """Pipe by which any thread can wake a polling thread with `signal`. The polling thread must call `clear`
    before it checks for work.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._is_set = False
        self._is_closed = False
        self._lock = threading.Lock()

    def signal(self) -> None:
        """Make `reader` readable, unless the pipe is closed. While an earlier signal is pending, a flag saves
        the system call.
        """
        if self._is_set:
            return
        with self._lock:
            if not self._is_closed:
                self._is_set = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Discard all signals so far. The flag for a pending signal is cleared after the pipe is read, so that
        any later signal writes to the pipe again.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        self._is_set = False

    def close(self) -> None:
        """Close the file descriptors. Idempotent; `signal` may be called concurrently and afterwards."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.reader)
                os.close(self._writer)

"""A pair of connected sockets that ends another thread's poll. Several signals are combined into one byte until that
thread reads it.
"""

from __future__ import annotations

import contextlib
import socket
import threading


class Wakeup:
    """Connection by which any thread can wake a polling thread with `signal`. The polling thread must call `clear`
    before it checks for work.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()  # not a pipe, which cannot be polled on Windows
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self.reader = self._receiver.fileno()
        self._is_set = False
        self._is_closed = False
        self._lock = threading.Lock()

    def signal(self) -> None:
        """Make `reader` readable, unless the sockets are closed. While an earlier signal is pending, a flag saves
        the system call.
        """
        if self._is_set:
            return
        with self._lock:
            if not self._is_closed:
                self._is_set = True
                with contextlib.suppress(BlockingIOError):
                    self._sender.send(b"\0")

    def clear(self) -> None:
        """Discard all signals so far. The flag for a pending signal is cleared after the byte is read, so that
        any later signal sends a byte again.
        """
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)
        self._is_set = False

    def close(self) -> None:
        """Close the sockets. Idempotent; `signal` may be called concurrently and afterwards."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._receiver.close()
                self._sender.close()

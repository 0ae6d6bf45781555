"""Replies that were read and that nobody took yet."""

from __future__ import annotations

import threading
from typing import Final

from kvscope_telemetry.messages.commands import Reply

MAX_REPLIES: Final = 50_000
MAX_BYTES: Final = 64 << 20
"""As they came over the wire; in memory they are a few times as large."""


class ReplyQueue:
    """Bounded in number and bytes, by asking for `room` before more are read.

    What finds no room is left at the engine, which gives a client up that leaves too much there.

    Oldest first. Any thread puts and takes.
    """

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """How many more may come; 0 when those that wait are large."""
        return max(0, MAX_REPLIES - len(self._replies)) if self._num_bytes <= MAX_BYTES else 0

    def put(self, reply: Reply, num_bytes: int = 0) -> None:
        """Append, whatever waits."""
        with self._lock:
            self._replies.append(reply)
            self._num_bytes += num_bytes

    def take_all(self) -> list[Reply]:
        """Everything that waits."""
        with self._lock:
            replies, self._replies, self._num_bytes = self._replies, [], 0
        return replies

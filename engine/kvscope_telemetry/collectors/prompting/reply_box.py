"""Queue of replies from many request threads to one reader, with backpressure while too many are queued."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kvscope_telemetry.messages.commands import Reply

MAX_WAITING: Final = 20_000
"""Number of queued replies at which reading of answers pauses. Replies already read are still enqueued."""


class ReplyBox:
    """Reply queue for many writers and one reader. Thread-safe."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, replies: Iterable[Reply]) -> None:
        """Append replies. Never blocks."""
        with self._changed:
            if not self._is_closed:
                self._replies.extend(replies)

    def drain(self) -> list[Reply]:
        """Return and clear all replies, oldest first."""
        with self._changed:
            taken, self._replies = self._replies, []
            if taken:
                self._changed.notify_all()
        return taken

    def wait_for_capacity(self) -> None:
        """Wait until fewer than `MAX_WAITING` replies are queued, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._replies) < MAX_WAITING)

    def close(self) -> None:
        """Reject further replies and wake all waiters."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

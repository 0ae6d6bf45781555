"""Queue of replies from many request threads to one reader, with backpressure while too many are queued."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kvscope_telemetry.messages.commands import Reply

MAX_WAITING: Final = 20_000
"""Number of queued replies above which no more answers are read. Replies that were already read are still enqueued."""


class ReplyBox:
    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, replies: Iterable[Reply]) -> None:
        with self._changed:
            if not self._is_closed:
                self._replies.extend(replies)

    def drain(self) -> list[Reply]:
        with self._changed:
            replies, self._replies = self._replies, []
            if replies:
                self._changed.notify_all()
        return replies

    def wait_for_capacity(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._replies) < MAX_WAITING)

    def close(self) -> None:
        """Discard further replies and wake all waiters."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

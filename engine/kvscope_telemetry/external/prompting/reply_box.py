"""A queue of answers for whoever asked. Owns the answers; makes readers wait while too many are queued."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kvscope_telemetry.messages.commands import Reply

MAX_WAITING: Final = 20_000
"""Then no more is read of the servers' answers; what is read already is still told."""


class ReplyBox:
    """For many threads that put, and one that takes."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, replies: Iterable[Reply]) -> None:
        """Never waits."""
        with self._changed:
            if not self._is_closed:
                self._replies.extend(replies)

    def take_all(self) -> list[Reply]:
        """Oldest first."""
        with self._changed:
            taken, self._replies = self._replies, []
            if taken:
                self._changed.notify_all()
        return taken

    def wait_for_room(self) -> None:
        """Until not too many wait, or it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._replies) < MAX_WAITING)

    def close(self) -> None:
        """Nothing more is taken in."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

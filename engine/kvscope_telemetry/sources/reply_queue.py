"""Queue of received replies that the consumer has not polled yet."""

from __future__ import annotations

import threading
from typing import Final

from kvscope_telemetry.messages.commands import Reply

MAX_REPLIES: Final = 50_000
MAX_BYTES: Final = 64 << 20
"""Limit on the encoded bytes in a `ReplyQueue`; decoded replies need a few times as much memory."""


class ReplyQueue:
    """Thread-safe FIFO queue of replies, bounded in number and bytes.

    The reader checks `num_free_slots` before it reads more. Further replies stay at the engine, which disconnects a
    client that leaves too many unread.
    """

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_free_slots(self) -> int:
        """Number of replies that may be added; 0 if the queued replies exceed `MAX_BYTES`."""
        return max(0, MAX_REPLIES - len(self._replies)) if self._num_bytes <= MAX_BYTES else 0

    def put(self, reply: Reply, num_bytes: int = 0) -> None:
        """Append a reply without checking the bounds."""
        with self._lock:
            self._replies.append(reply)
            self._num_bytes += num_bytes

    def drain(self) -> list[Reply]:
        with self._lock:
            replies, self._replies, self._num_bytes = self._replies, [], 0
        return replies

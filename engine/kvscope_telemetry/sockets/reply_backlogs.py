"""Replies that clients have not taken yet: a queue a client, bounded in bytes. Knows no sockets.

A client that does not read loses its own replies and nobody else's. Its engine is told, so that no work is
done for it; what is said to it afterwards (that its requests were aborted) waits in an empty queue again.
All queues together are bounded as well: then the longest is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

MAX_BACKLOG_BYTES = 32 << 20
MAX_ANSWER_BYTES = 16 << 20
"""Beyond it a client that asks for more is told to read first: the rest is for what it did not ask for."""
MAX_TOTAL_BYTES = 256 << 20
REPLY_OVERHEAD_BYTES = 100


class Delivery(Enum):
    """What became of a reply handed to the socket."""

    SENT = "sent"
    FULL = "full"
    """The client does not read fast enough: try again later."""
    GONE = "gone"
    """The client is not connected any more."""


@dataclass(slots=True)
class _Queue:
    replies: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0

    def append(self, data: bytes) -> None:
        self.replies.append(data)
        self.num_bytes += len(data) + REPLY_OVERHEAD_BYTES

    def popleft(self) -> None:
        self.num_bytes -= len(self.replies.popleft()) + REPLY_OVERHEAD_BYTES


class ReplyBacklogs:
    """Sends through `send`, in order for each client, and calls `on_lost` once for a client that is lost."""

    def __init__(
        self,
        send: Callable[[bytes, bytes], Delivery],
        on_lost: Callable[[bytes], None],
        max_bytes: int = MAX_BACKLOG_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self.num_bytes = 0
        """Of all that waits."""
        self._send = send
        self._on_lost = on_lost
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._queues: dict[bytes, _Queue] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queues

    def add(self, client: bytes, data: bytes) -> None:
        """Send `data` after everything that already waits for `client`."""
        queue = self._queues.setdefault(client, _Queue())
        if queue.replies and queue.num_bytes + len(data) > self._max_bytes:
            self._lose(client)
            return
        queue.append(data)
        self.num_bytes += len(data) + REPLY_OVERHEAD_BYTES
        if len(queue.replies) == 1:
            self._drain(client, queue)
        while self.num_bytes > self._max_total_bytes and len(self._queues) > 1:
            self._lose(max(self._queues, key=lambda other: self._queues[other].num_bytes))

    def has_room(self, client: bytes, num_bytes: int = 0) -> bool:
        """Whether an answer of so many bytes may wait for `client` too; one alone always may."""
        queue = self._queues.get(client)
        return queue is None or queue.num_bytes + num_bytes <= MAX_ANSWER_BYTES

    def retry(self) -> bool:
        """Offer what waits once more; whether anything went."""
        return sum(self._drain(client, queue) for client, queue in list(self._queues.items())) > 0

    def _drain(self, client: bytes, queue: _Queue) -> bool:
        num_before = len(queue.replies)
        while queue.replies:
            delivery = self._send(client, queue.replies[0])
            if delivery is Delivery.GONE:
                self._lose(client)
                return False
            if delivery is Delivery.FULL:
                return len(queue.replies) < num_before
            self.num_bytes -= len(queue.replies[0]) + REPLY_OVERHEAD_BYTES
            queue.popleft()
        del self._queues[client]
        return True

    def _lose(self, client: bytes) -> None:
        queue = self._queues.pop(client, None)
        self.num_bytes -= 0 if queue is None else queue.num_bytes
        self._on_lost(client)

"""Replies that clients have not taken yet: a queue a client, bounded in bytes. Knows no sockets.

A client that does not read loses its own replies and nobody else's. Its engine is told, so that no work is
done for it; what is said to it afterwards (that its requests were aborted) waits in an empty queue again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

MAX_BACKLOG_BYTES = 32 << 20
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
    ) -> None:
        self._send = send
        self._on_lost = on_lost
        self._max_bytes = max_bytes
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
        if len(queue.replies) == 1:
            self._drain(client, queue)

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
            queue.popleft()
        del self._queues[client]
        return True

    def _lose(self, client: bytes) -> None:
        self._queues.pop(client, None)
        self._on_lost(client)

"""Sends replies to clients: encodes them, queues them while a client does not read, and sends them over the ROUTER
socket.

Owns the queue of each client, and the large replies held by ZeroMQ. Must be used on the thread that owns the socket.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import zmq

from kvscope_telemetry.messages.commands import AllocatorMap, BlockText, Failed, Reply
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.messages.wire import encode

MAX_BACKLOG_BYTES = 32 << 20
MAX_ANSWER_BYTES = 16 << 20
"""Number of bytes queued for a client above which its requests for data are refused until it reads. The rest of
the queue's capacity is reserved for messages that the client did not request.
"""
MAX_TOTAL_BYTES = 256 << 20
REPLY_OVERHEAD_BYTES = 100
RETRY_S: Final = (0.002, 0.05)
"""Initial and maximum delay before queued replies are sent again to a client that does not read."""
BIG_REPLY_BYTES: Final = 16 << 10
"""Size from which a reply counts as large. Each client has at most one large reply in ZeroMQ's queue at a time,
and smaller replies of at most 4 MiB.
"""
MAX_REPLY_BYTES_IN_FLIGHT: Final = 128 << 20
"""Maximum bytes of large replies to all clients in ZeroMQ's queues. If they exceed it, the client with the
largest reply is disconnected.
"""

NOT_READ: Final = "replies are not read: the connection is closed; the client receives them on its next connection"


class ReplySender:
    """Sends replies in order to each client.

    `on_lost(client)` is called when a client has disconnected or does not read; `cut(client)` is called to disconnect
    it.
    """

    def __init__(
        self, router: zmq.Socket[bytes], on_lost: Callable[[bytes], None], cut: Callable[[bytes], None]
    ) -> None:
        self.retry_s = RETRY_S[0]
        """Delay until the next call of `retry`."""
        self._router = router
        self._cut = cut
        self._backlogs = ReplyBacklogs(self._send, on_lost)
        self._big_replies: dict[bytes, tuple[zmq.MessageTracker, int]] = {}

    @property
    def is_empty(self) -> bool:
        return self._backlogs.is_empty

    def answer(self, client: bytes, reply: Reply) -> None:
        """Send `reply` after all replies queued for `client`. Requested data is refused while the client does
        not read.
        """
        is_answer = isinstance(reply, Snapshot | BlockText | AllocatorMap)
        if is_answer and not self._backlogs.has_capacity(client):
            self._backlogs.add(client, encode(_read_first(reply)))
            return
        try:
            data = encode(reply)
        except (ValueError, TypeError, OverflowError) as error:
            data = encode(Failed(reason=f"the answer could not be written: {error!r:.200}"))
        if is_answer and not self._backlogs.has_capacity(client, len(data)):
            data = encode(_read_first(reply))
        self._backlogs.add(client, data)

    def notify_lost(self, client: bytes) -> bool:
        """Send a lost client the reason, if it can still receive it. Returns whether the client is still connected."""
        try:
            self._router.send(client, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(encode(Failed(reason=NOT_READ)), zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def retry(self) -> None:
        if not self.is_empty:
            self.retry_s = RETRY_S[0] if self._backlogs.retry() else min(2 * self.retry_s, RETRY_S[1])

    def finish(self, seconds: float) -> None:
        """Try to send queued replies until the queues are empty, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_empty and time.monotonic() < deadline:
            time.sleep(RETRY_S[0])
            self._backlogs.retry()

    def _send(self, client: bytes, data: bytes) -> Delivery:
        if len(data) >= BIG_REPLY_BYTES and not self._big_reply_done(client):
            return Delivery.FULL
        try:
            self._router.send(client, zmq.SNDMORE | zmq.NOBLOCK)
            if len(data) < BIG_REPLY_BYTES:
                self._router.send(data, zmq.NOBLOCK)
            else:
                self._big_replies[client] = (send_tracked(self._router, data), len(data))
                self._bound_big_replies()
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError:
            self._big_replies.pop(client, None)
            return Delivery.GONE
        return Delivery.SENT

    def _big_reply_done(self, client: bytes) -> bool:
        """Return whether the client's previous large reply has left ZeroMQ."""
        self._big_replies = {other: big for other, big in self._big_replies.items() if not big[0].done}
        return client not in self._big_replies

    def _bound_big_replies(self) -> None:
        sizes = {client: size for client, (tracker, size) in self._big_replies.items() if not tracker.done}
        if len(sizes) > 1 and sum(sizes.values()) > MAX_REPLY_BYTES_IN_FLIGHT:
            largest = max(sizes, key=lambda client: sizes[client])
            self._cut(largest)
            del self._big_replies[largest]


def _read_first(reply: Reply) -> Failed:
    reason = f"{MAX_ANSWER_BYTES} bytes of answers are unread: read them before sending more commands"
    return Failed(reason=reason, tag=getattr(reply, "tag", 0))


# Queued replies: one queue per client, bounded in bytes.
#
# A client that does not read loses only its own replies. `on_lost` reports it to the engine, so that its requests are
# aborted; later replies to it (that they were aborted) go to a new queue. The total size of all queues is bounded, too:
# beyond that, the client with the largest queue is lost.
class Delivery(Enum):
    SENT = "sent"
    FULL = "full"
    """The client does not read fast enough; the reply must be sent later."""
    GONE = "gone"


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
    """Sends replies through `send`, in order for each client, and calls `on_lost` once for a client that is lost."""

    def __init__(
        self,
        send: Callable[[bytes, bytes], Delivery],
        on_lost: Callable[[bytes], None],
        max_bytes: int = MAX_BACKLOG_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self.num_bytes = 0
        """Total bytes in the queues of all clients."""
        self._send = send
        self._on_lost = on_lost
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._queues: dict[bytes, _Queue] = {}

    @property
    def is_empty(self) -> bool:
        return not self._queues

    def add(self, client: bytes, data: bytes) -> None:
        """Send `data` after all replies queued for `client`."""
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

    def has_capacity(self, client: bytes, num_bytes: int = 0) -> bool:
        """Return whether a reply of `num_bytes` may be queued for `client`. Any reply fits in an empty queue."""
        queue = self._queues.get(client)
        return queue is None or queue.num_bytes + num_bytes <= MAX_ANSWER_BYTES

    def retry(self) -> bool:
        """Try to send queued replies. Returns whether any were sent."""
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


def send_tracked(socket: zmq.Socket[bytes], data: bytes) -> zmq.MessageTracker:
    """Send `data` without a copy; it must not be modified. Raises zmq.Again if it cannot be sent now."""
    tracker = socket.send(data, zmq.NOBLOCK, copy=False, track=True)
    assert tracker is not None, "a tracked send gives its tracker"
    return tracker

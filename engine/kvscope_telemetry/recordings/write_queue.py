"""Queue between the threads that record and the writing thread. Limited in bytes; messages that do not fit are
refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

import msgspec

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.summaries.bookmark import Bookmark

MAX_QUEUED_BYTES: Final = 64 << 20
GATHER_S: Final = 0.25
"""How long a message waits for further messages, in seconds. At hundreds of messages per second, waking the writer
costs more than writing.
"""
_URGENT_BYTES: Final = 1 << 20


Texts = tuple[RecordedText, ...]


class Queued(msgspec.Struct, frozen=True, gc=False):
    message: TelemetryMessage | Texts
    """The message or texts; `()` if only `data` is given."""
    data: bytes | None
    num_bytes: int
    log_time_ns: int | None
    """Wall-clock time of the message. If None, the recording's clock determines it."""
    queued_s: float


Mark = threading.Event
"""Flush marker in the queue. The event is set once everything queued before the marker is written, or the
writer has stopped.
"""


class RecordingQueue:
    """Bounded FIFO queue. Any thread may append; one thread drains. `close` refuses further messages."""

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: deque[Queued | Mark | Bookmark] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_urgent = False
        """Whether the writer must be woken immediately, because a caller is waiting or so many bytes are queued."""
        self._is_idle = False
        """Whether the draining thread waits for the queue to become non-empty."""
        self.num_refused = 0
        """Number of messages that `put` refused, and of queued ones that `close` discarded."""

    def put(self, message: TelemetryMessage, data: bytes | None, *, wait: bool, log_time_ns: int | None = None) -> bool:
        """Append a message and return whether it was accepted. `wait` blocks until there is capacity. A message of any
        size is accepted while at most half of the capacity is used.
        """
        num_bytes = approximate_bytes(message) if data is None else len(data)
        return self._enqueue(Queued(message, data, num_bytes, log_time_ns, time.monotonic()), wait=wait)

    def put_bytes(self, data: bytes, *, wait: bool) -> bool:
        """Append an encoded message without decoding it, because its decoded form would more than double the
        memory needed.
        """
        return self._enqueue(Queued((), data, len(data), None, time.monotonic()), wait=wait)

    def put_texts(self, texts: Texts, *, wait: bool) -> bool:
        num_bytes = sum(len(text.text) + 8 * len(text.token_ids) + 100 for text in texts)
        return self._enqueue(Queued(texts, None, num_bytes, None, time.monotonic()), wait=wait)

    def _enqueue(self, queued: Queued, *, wait: bool) -> bool:
        num_bytes = queued.num_bytes
        with self._changed:
            while wait and not self._is_closed and self._is_full(num_bytes):
                self._request_drain()
                self._changed.wait()
            if self._is_closed or self._is_full(num_bytes):
                self.num_refused += 1
                return False
            self._messages.append(queued)
            self._num_bytes += num_bytes
            if self._num_bytes >= min(_URGENT_BYTES, self._max_bytes // 2):
                self._request_drain()
            elif self._is_idle:
                self._changed.notify_all()
            return True

    def put_mark(self, mark: Mark) -> None:
        """Append a flush marker, regardless of the queue's limit. If the queue is closed, the marker is set
        immediately.
        """
        with self._changed:
            if self._is_closed:
                mark.set()
            else:
                self._messages.append(mark)
                self._request_drain()

    def put_bookmark(self, bookmark: Bookmark) -> bool:
        """Append a bookmark, regardless of the queue's limit: bookmarks are few and small. Returns False if the
        queue is closed.
        """
        with self._changed:
            if not self._is_closed:
                self._messages.append(bookmark)
                self._changed.notify_all()
            return not self._is_closed

    def drain(self, timeout_s: float) -> list[Queued | Mark | Bookmark] | None:
        """Wait for a message and briefly for further ones, at most `timeout_s`, and return all queued items.
        Returns None once the queue is closed and empty.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            self._gather(until_s)
            if not self._messages and not self._is_closed:
                self._is_idle = True
                self._changed.wait_for(lambda: self._messages or self._is_closed, until_s - time.monotonic())
                self._is_idle = False
                self._gather(until_s)
            self._is_urgent = False
            if self._is_closed and not self._messages:
                return None
            items, self._messages, self._num_bytes = list(self._messages), deque(), 0
            self._changed.notify_all()
            return items

    def close(self, *, discard: bool = False) -> None:
        """Refuse further messages and wake blocked callers. `discard` drops the queued messages."""
        with self._changed:
            self._is_closed = True
            if discard:
                for item in self._messages:
                    if isinstance(item, Mark):
                        item.set()
                    elif isinstance(item, Queued):
                        self.num_refused += 1
                self._messages.clear()
            self._changed.notify_all()

    def _gather(self, until_s: float) -> None:
        """Wait for messages to accumulate, at most `GATHER_S` since the oldest message was queued."""
        now_s = time.monotonic()
        first_s = next((each.queued_s for each in self._messages if isinstance(each, Queued)), now_s)
        wait_s = min(first_s + GATHER_S, until_s) - now_s
        if wait_s > 0:
            self._changed.wait_for(lambda: self._is_urgent or self._is_closed, wait_s)

    def _request_drain(self) -> None:
        if not self._is_urgent:
            self._is_urgent = True
            self._changed.notify_all()

    def _is_full(self, num_bytes: int) -> bool:
        if not self._messages or self._num_bytes + num_bytes <= self._max_bytes:
            return False
        return num_bytes <= self._max_bytes or self._num_bytes > self._max_bytes // 2

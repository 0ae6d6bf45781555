"""The queue between those who record and the thread that writes. Bounded by bytes; what does not fit is refused."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

import msgspec

from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.texts.block_texts import RecordedText

MAX_QUEUED_BYTES: Final = 64 << 20
GATHER_S: Final = 0.25
"""A message waits so long for others: at hundreds of messages a second waking up costs more than writing."""
_MUCH_BYTES: Final = 1 << 20


Texts = tuple[RecordedText, ...]


class Queued(msgspec.Struct, frozen=True, gc=False):
    """A message and, where the caller had them, its bytes."""

    message: TelemetryMessage | Texts
    """`()` where the bytes alone are wanted."""
    data: bytes | None
    num_bytes: int
    log_time_ns: int | None
    """When it was, by the wall clock; None: as the recording's clock says."""
    given_s: float
    """When it was given, by the monotonic clock."""


Mark = threading.Event
"""Waits among the messages: set once all before it are written, or nobody writes any more."""


class RecordingQueue:
    """Messages in order. Any thread puts, one takes; `close` lets nothing more in."""

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: deque[Queued | Mark | Bookmark] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_urgent = False
        """Whether somebody waits, or much does."""
        self._is_idle = False
        """Whether who takes waits for the next to come at all."""
        self.num_refused = 0
        """Messages that `put` did not take, and those that waited when nobody took them any more."""

    def put(self, message: TelemetryMessage, data: bytes | None, *, wait: bool, log_time_ns: int | None = None) -> bool:
        """Append; False when it was not taken. `wait` waits for room. Where little waits any size is taken."""
        num_bytes = approximate_bytes(message) if data is None else len(data)
        return self._put(Queued(message, data, num_bytes, log_time_ns, time.monotonic()), wait=wait)

    def put_bytes(self, data: bytes, *, wait: bool) -> bool:
        """The same of a message of which the bytes alone are wanted: decoded it takes as much again, and more."""
        return self._put(Queued((), data, len(data), None, time.monotonic()), wait=wait)

    def put_texts(self, texts: Texts, *, wait: bool) -> bool:
        """The same of texts of blocks."""
        num_bytes = sum(len(text.text) + 8 * len(text.token_ids) + 100 for text in texts)
        return self._put(Queued(texts, None, num_bytes, None, time.monotonic()), wait=wait)

    def _put(self, queued: Queued, *, wait: bool) -> bool:
        num_bytes = queued.num_bytes
        with self._changed:
            while wait and not self._is_closed and self._is_full(num_bytes):
                self._hurry()
                self._changed.wait()
            if self._is_closed or self._is_full(num_bytes):
                self.num_refused += 1
                return False
            self._messages.append(queued)
            self._num_bytes += num_bytes
            if self._num_bytes >= min(_MUCH_BYTES, self._max_bytes // 2):
                self._hurry()
            elif self._is_idle:
                self._changed.notify_all()
            return True

    def put_mark(self, mark: Mark) -> None:
        """Append a mark, whatever waits; it is set at once when nothing more is put."""
        with self._changed:
            if self._is_closed:
                mark.set()
            else:
                self._messages.append(mark)
                self._hurry()

    def put_bookmark(self, bookmark: Bookmark) -> bool:
        """Append one, whatever waits: they are few and small. False when it was not taken."""
        with self._changed:
            if not self._is_closed:
                self._messages.append(bookmark)
                self._changed.notify_all()
            return not self._is_closed

    def take(self, timeout_s: float) -> list[Queued | Mark | Bookmark] | None:
        """All that waits, soon and after `timeout_s` at the latest; None when it is closed and empty."""
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
            taken, self._messages, self._num_bytes = list(self._messages), deque(), 0
            self._changed.notify_all()
            return taken

    def close(self, *, discard: bool = False) -> None:
        """Nothing more is put; who waits for room is let go. `discard` throws away what waits."""
        with self._changed:
            self._is_closed = True
            if discard:
                for waiting in self._messages:
                    if isinstance(waiting, Mark):
                        waiting.set()
                    elif isinstance(waiting, Queued):
                        self.num_refused += 1
                self._messages.clear()
            self._changed.notify_all()

    def _gather(self, until_s: float) -> None:
        """Let some come together; no longer where the first of them has waited already, for a state to be written."""
        now_s = time.monotonic()
        first_s = next((each.given_s for each in self._messages if isinstance(each, Queued)), now_s)
        left_s = min(first_s + GATHER_S, until_s) - now_s
        if left_s > 0:
            self._changed.wait_for(lambda: self._is_urgent or self._is_closed, left_s)

    def _hurry(self) -> None:
        if not self._is_urgent:
            self._is_urgent = True
            self._changed.notify_all()

    def _is_full(self, num_bytes: int) -> bool:
        if not self._messages or self._num_bytes + num_bytes <= self._max_bytes:
            return False
        return num_bytes <= self._max_bytes or self._num_bytes > self._max_bytes // 2

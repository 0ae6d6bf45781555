"""Batches on their way from the engine's thread to the publisher's: numbered, bounded, and nobody waits.

Owns the sequence numbers. A batch for which there is no room is dropped and keeps its number, so that consumers see a
hole where it was.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvscope_telemetry.kv_events.batches import BlockStored, EventBatch, KvEvent

MAX_QUEUED_BYTES: Final = 64 << 20
"""About what waiting batches take, beside their number."""
_EVENT_BYTES: Final = 512
_NUMBER_BYTES: Final = 40
"""Of one hash or token in Python."""


class BatchQueue:
    """At most `max_batches` wait. `put` on one thread, `take` on another."""

    def __init__(self, max_batches: int, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, EventBatch, int]] = deque()
        self._num_bytes = 0
        self.next_seq = 0
        """Of the batch that comes next."""
        self.num_dropped = 0

    def put(self, batch: EventBatch) -> bool:
        """Give the batch a number; whether there was room for it."""
        num_bytes = sum(map(_size, batch.events))
        with self._lock:
            seq, self.next_seq = self.next_seq, self.next_seq + 1
            has_room = len(self._waiting) < self._max_batches and self._num_bytes + num_bytes <= self._max_bytes
            if has_room:
                self._waiting.append((seq, batch, num_bytes))
                self._num_bytes += num_bytes
            else:
                self.num_dropped += 1
        return has_room

    def take(self) -> tuple[int, EventBatch] | None:
        """The oldest with its number, None when nothing waits."""
        with self._lock:
            if not self._waiting:
                return None
            seq, batch, num_bytes = self._waiting.popleft()
            self._num_bytes -= num_bytes
        return seq, batch


def _size(event: KvEvent) -> int:
    numbers = len(event.token_ids) + len(event.block_hashes) if isinstance(event, BlockStored) else 0
    return _EVENT_BYTES + _NUMBER_BYTES * numbers

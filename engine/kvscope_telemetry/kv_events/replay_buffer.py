"""The last batches as bytes, for consumers that missed some or come late. Bounded in number and in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

MAX_BUFFER_BYTES: Final = 128 << 20


class ReplayBuffer:
    """At most `max_batches`, the newest, in `max_bytes`."""

    def __init__(self, max_batches: int, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._num_bytes = 0

    def add(self, seq: int, payload: bytes) -> None:
        """A batch that was published; the oldest make room."""
        self._batches.append((seq, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or (self._num_bytes > self._max_bytes and len(self._batches) > 1):
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Those from `seq` on."""
        return (item for item in self._batches if item[0] >= seq)

"""Items of a stream on their way from the reading thread to who follows it, bounded by the bytes they came in."""

from __future__ import annotations

import threading
from typing import Final

from kvscope_telemetry.kv_events.stream_items import StreamItem

MAX_PENDING_BYTES: Final = 16 << 20
"""As they came over the wire; as objects they take about ten times that."""
_ITEM_BYTES: Final = 256


class PendingItems:
    """`give` on one thread, `take` on another."""

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._lock = threading.Lock()
        self._items: list[StreamItem] = []
        self._num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self._num_bytes < self._max_bytes

    def give(self, item: StreamItem, num_bytes: int) -> None:
        """The next item."""
        with self._lock:
            self._items.append(item)
            self._num_bytes += num_bytes + _ITEM_BYTES

    def take(self) -> list[StreamItem]:
        """All that waits."""
        with self._lock:
            items, self._items = self._items, []
            self._num_bytes = 0
        return items

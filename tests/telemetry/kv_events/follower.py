"""A consumer of KV events that keeps the set of cached hashes."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockStored, KvEvent
from kvscope_telemetry.kv_events.stream_items import Received, Reset, StreamItem


class Follower:
    """Applies events or stream items and keeps the cached hashes."""

    def __init__(self) -> None:
        self.cached: set[int] = set()
        self.items: list[StreamItem] = []

    def take(self, items: Iterable[StreamItem]) -> None:
        for item in items:
            self.items.append(item)
            if isinstance(item, Reset):
                self.cached.clear()
            elif isinstance(item, Received):
                self.apply(item.batch.events)

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.cached.clear()
            elif isinstance(event, BlockStored):
                self.cached.update(event.block_hashes)
            else:
                self.cached.difference_update(event.block_hashes)

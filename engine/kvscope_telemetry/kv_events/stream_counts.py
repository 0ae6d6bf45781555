"""What went by in a stream of KV events, counted."""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.kv_events.batches import EventBatch


@dataclass(slots=True)
class StreamCounts:
    """Since the beginning; see `StreamStatus`."""

    batches: int = 0
    events: int = 0
    missing: int = 0
    unreadable: int = 0
    unknown_events: int = 0
    unknown_fields: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0

    def take(self, batch: EventBatch) -> None:
        """A batch was given."""
        self.batches += 1
        self.events += len(batch.events)
        self.unreadable += batch.num_unreadable_events
        self.unknown_events += batch.num_unknown_events
        self.unknown_fields += batch.num_unknown_fields

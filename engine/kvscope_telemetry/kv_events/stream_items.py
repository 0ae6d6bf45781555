"""What a stream of KV events gives to who follows it, and how it says that it is.

The order of items is all that matters: a follower that forgets everything at a `Reset` and applies each batch holds
what the publisher holds, as far as `StreamStatus.why` does not say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvscope_telemetry.kv_events.batches import EventBatch


class StreamState(StrEnum):
    """How what was given stands to what is."""

    JOINING = "joining"
    """Nothing is known yet."""
    REPLAYING = "replaying"
    """What was missed, or came before, is being asked for."""
    LIVE = "live"
    """All is known."""
    UNCERTAIN = "uncertain"
    """Something is missing, and cannot be had any more, or not now."""
    LOST = "lost"
    """There is no connection, or not to a publisher of KV events."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """The state of the stream at one moment."""

    state: StreamState = StreamState.JOINING
    why: str = ""
    """One sentence; empty where there is nothing to say."""
    seq: int = -1
    """Of the last batch that was given, or given up; -1 before the first."""
    ts: float = 0.0
    """Of the last batch, on the publisher's clock."""
    data_parallel_rank: int | None = None
    num_batches: int = 0
    num_events: int = 0
    num_missing: int = 0
    """Batches that were never seen, or could not be read."""
    num_unreadable: int = 0
    """Batches and events of known kinds that could not be read."""
    num_unknown_events: int = 0
    num_unknown_fields: int = 0
    num_duplicates: int = 0
    """Batches that came twice without being asked for, and late ones that were given up already."""
    num_restarts: int = 0
    num_replays: int = 0
    num_of_other_ranks: int = 0
    """Messages that are no KV events."""


@dataclass(frozen=True, slots=True)
class Received:
    """The next batch of events."""

    seq: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first` to `last` are missing for good: blocks may be shown that are gone, and others not shown."""

    first: int
    last: int
    why: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Nothing that was said before holds any more; what follows begins anew."""

    why: str


StreamItem = Received | Gap | Reset

"""Items that a stream of KV events returns, and its status.

A consumer that drops all blocks at a `Reset` and applies all batches in order has the publisher's cache contents,
unless `StreamStatus.why` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvscope_telemetry.kv_events.batches import EventBatch


class StreamState(StrEnum):
    """Relation of the reported cache contents to the actual ones."""

    JOINING = "joining"
    """No cache contents are known yet."""
    REPLAYING = "replaying"
    """Missed or earlier batches are being requested."""
    LIVE = "live"
    """The reported contents are complete."""
    UNCERTAIN = "uncertain"
    """Batches are missing and cannot be obtained at present."""
    LOST = "lost"
    """There is no connection, or the peer does not publish KV events."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    state: StreamState = StreamState.JOINING
    why: str = ""
    """Reason for the state in one sentence; empty if there is none."""
    seq: int = -1
    """Sequence number of the last batch passed on or accepted as missing; -1 before the first."""
    ts: float = 0.0
    """Time of the last batch in seconds since 1970, on the publisher's clock."""
    data_parallel_rank: int | None = None
    num_batches: int = 0
    num_events: int = 0
    num_missing: int = 0
    """Number of batches that were never received or could not be decoded."""
    num_unreadable: int = 0
    """Number of batches, and of events of known kinds, that could not be decoded."""
    num_unknown_events: int = 0
    num_unknown_fields: int = 0
    num_duplicates: int = 0
    """Number of batches received twice without a request, and of late batches that were already accepted as missing."""
    num_restarts: int = 0
    num_replays: int = 0
    num_malformed: int = 0
    """Number of received messages that are not KV events, judged by the number of their parts."""
    ambiguous_topics: tuple[str, ...] = ()
    """Topics of all publishers at the endpoint if it is unknown which one is meant. The first one is read."""


@dataclass(frozen=True, slots=True)
class Received:
    seq: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first` to `last` are permanently missing. Blocks that they removed may still be shown, and blocks that
    they stored may not be shown.
    """

    first: int
    last: int
    why: str


@dataclass(frozen=True, slots=True)
class Reset:
    """All earlier items are invalid. The contents are reported again from the beginning."""

    why: str


StreamItem = Received | Gap | Reset

"""A summary: one second of a session, small enough that hours of them are read at once.

Owns what is in it and how it lies in a recording (JSON, with a schema). Who computes it is `summarizer`; what a view
makes of many is `overview`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Event, Stop

SECOND_NS: Final = 1_000_000_000
MAX_BINS: Final = 1_024
"""Address bins: a pool of fewer rows has one a row."""
MAX_SUMMARY_BYTES: Final = 1 << 20
MAX_LIST_BYTES: Final = 4 * MAX_SUMMARY_BYTES
"""Of events that lie together."""


class Latency(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Of the times that ended in the second; -1 where there were none."""

    count: int = 0
    p50_s: float = -1.0
    p95_s: float = -1.0
    p99_s: float = -1.0
    p50_above_s: float = -1.0
    """Where latencies are told as a histogram: the percentile is above this and at most `p50_s`; -1: it is `p50_s`. So
    are the next two. A percentile without an upper bound is -1."""
    p95_above_s: float = -1.0
    p99_above_s: float = -1.0
    buckets: bytes = b""
    """How many took how long (`latency_buckets`); empty where latencies are told as a histogram."""


class AddressBins(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The ledger's rows, in order, over equal bins (`bin_edges`); packed little-endian, base64 in JSON.

    Shares are 0 to 255, and never 0 where there is one at all.
    """

    active: bytes = b""
    """u1: share of the rows that a request holds."""
    cached: bytes = b""
    """u1: share of the rows that nobody holds and a later prompt may reuse."""
    shared: bytes = b""
    """u1: share of the rows that several requests hold."""
    filled: bytes = b""
    """u1: share of the slots that hold a token."""
    owner: bytes = b""
    """i4: the newest request that owns a row of the bin, -1 none."""


class CarriedStep(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The step that ended first in a second, if it began before that second: its tokens were computed in both."""

    before_ns: int = 0
    """Time from its beginning to the beginning of the second in which it ended."""
    length_ns: int = 0
    """Time from its beginning to its end."""
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The second that begins at `time_ns`. Counts are of this second (tokens: of steps that ended in it); `num_…` and
    `…_blocks` without a verb are levels at its end, `peak_…` the largest values within it. -1: unknown."""

    time_ns: int
    """By the recording's clock: nanoseconds since 1970."""
    epoch: int
    step: int = 0
    """The newest at its end."""
    num_steps: int = 0
    num_lost_frames: int = 0
    num_running: int = 0
    num_waiting: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    """Blocks that there is room for."""
    shared_blocks: int = 0
    host_blocks: int = 0
    """Places of host memory in use."""
    disk_blocks: int = 0
    used_slots: int = 0
    """Slots of active blocks that hold a token."""
    longest_free_run: int = 0
    """Blocks, one after another in address order, that hold nothing."""
    num_free_runs: int = 0
    free_runs: tuple[int, ...] = ()
    """How many runs have 1, 2 to 3, 4 to 7, … blocks."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    """As in `messages.Counters`."""
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    swapped_blocks: int = 0
    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    schedule_ns: int = 0
    run_ns: int = 0
    forward_ns: int = 0
    commit_ns: int = 0
    record_ns: int = 0
    first_token: Latency = Latency()
    inter_token: Latency = Latency()
    queued: Latency = Latency()
    """What each of the three counts is in `latencies`."""
    utilization: float = -1.0
    power_watts: float = -1.0
    temperature_celsius: float = -1.0
    process_bytes: int = -1
    memory_used_bytes: int = -1
    num_rows: int = 0
    """Rows of the ledger, over which the bins are."""
    bins: AddressBins | None = None
    """None: as in the second before."""
    longest_wait_s: float = -1.0
    """How long the request that waits longest for its first step has waited; 0 where none waits."""
    stalled_s: float = -1.0
    """How long unfinished requests have been without a step that ended, as the engine's heartbeats tell; 0 where there
    are none, and where somebody holds the engine's steps."""
    phases: bytes | None = None
    """Phases of requests that no event tells (`request_phases.PHASE`); None: nobody looked for them."""
    pool_blocks: int = -1
    """Blocks of the pool, where not all of active, cached and free ones are known; otherwise -1: their sum."""
    draft_tokens: int = 0
    """Guessed ahead and checked, and those of them that were right."""
    accepted_tokens: int = 0
    flops: int = 0
    """That its steps' forward passes had to do at least, and bytes that they had to move: over `forward_ns` both are
    what was achieved."""
    moved_bytes: int = 0
    stops: tuple[Stop, ...] = ()
    """When the engine stood still, by the recording's clock: stops that ended in the second, each as a whole, and what
    there was so far of one that goes on. The first summary of an engine start has those of before as well."""
    prompt_tokens: int = -1
    generation_tokens: int = -1
    restored_tokens: int = -1
    recomputed_tokens: int = -1
    """These four as in `messages.Counters`."""
    moments: bytes | None = None
    """When requests first ran and got their first token (`moments.RequestMoment`); None: nobody looked for them."""
    peak_active_blocks: int = -1
    peak_active_ns: int = -1
    """Time from the beginning of the second until `peak_active_blocks` was first reached."""
    peak_running: int = -1
    peak_running_ns: int = -1
    peak_waiting: int = -1
    peak_waiting_ns: int = -1
    held_slots: int = -1
    """Slots that requests hold, and those of them that are wasted (`state.pool_use`)."""
    wasted_slots: int = -1
    carried_step: CarriedStep | None = None


class TimedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event, and when it was by the recording's clock."""

    time_ns: int
    epoch: int
    event: Event


class TimedEvents(msgspec.Struct, frozen=True, gc=False):
    """Events of some seconds, which lie together: thousands of small messages would take more than what they tell."""

    events: list[TimedEvent]


_Item = TypeVar("_Item")
_summaries: Final = msgspec.json.Decoder(Summary)
_events: Final = msgspec.json.Decoder(TimedEvent)
_event_lists: Final = msgspec.json.Decoder(TimedEvents)
_encoder: Final = msgspec.json.Encoder()


def encode(item: Summary | TimedEvent) -> bytes:
    """As JSON."""
    return _encoder.encode(item)


def join_events(encoded: Iterable[bytes]) -> bytes:
    """As a `TimedEvents`; `encoded` each as `encode` gave it."""
    return b'{"events":[' + b",".join(encoded) + b"]}"


def decode_event_list(data: bytes) -> list[TimedEvent]:
    """Raises ProtocolError for what is none."""
    return _decoded(_event_lists, data, MAX_LIST_BYTES).events


def decode_summary(data: bytes) -> Summary:
    """Raises ProtocolError for what is none."""
    return _decoded(_summaries, data)


def decode_event(data: bytes) -> TimedEvent:
    """Raises ProtocolError for what is none."""
    return _decoded(_events, data)


def schema_of(kind: type[msgspec.Struct]) -> bytes:
    """Its JSON schema, for other tools."""
    return msgspec.json.encode(msgspec.json.schema(kind))


def _decoded(decoder: msgspec.json.Decoder[_Item], data: bytes, max_bytes: int = MAX_SUMMARY_BYTES) -> _Item:
    if len(data) > max_bytes:
        raise ProtocolError(f"a summary of {len(data)} bytes: at most {max_bytes} are accepted")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"a summary that cannot be read: {error}") from None

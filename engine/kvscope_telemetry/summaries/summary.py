"""Summary of one second of a session, small enough to read hours of them together.

Owns its contents and its encoding in a recording (JSON, with a schema). `summarizer` computes it; `session_overview`
collects many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Event, Stop

SECOND_NS: Final = 1_000_000_000
MAX_BINS: Final = 1_024
"""Maximum number of address bins. A pool with fewer rows has one bin per row."""
MAX_SUMMARY_BYTES: Final = 1 << 20
MAX_LIST_BYTES: Final = 4 * MAX_SUMMARY_BYTES


class Latency(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Latencies that ended in the second; -1 if there were none."""

    count: int = 0
    p50_s: float = -1.0
    p95_s: float = -1.0
    p99_s: float = -1.0
    p50_above_s: float = -1.0
    """Lower bound of the percentile if the engine reports a histogram: the percentile is above this and at most
    `p50_s`. -1: the percentile is `p50_s`. The next two fields are alike. A percentile without an upper bound is
    -1.
    """
    p95_above_s: float = -1.0
    p99_above_s: float = -1.0
    buckets: bytes = b""
    """Latency buckets (`latency_buckets`); empty if the engine reports a histogram."""


class AddressBins(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The ledger's rows aggregated over equal bins in address order (`bin_edges`); packed little-endian, base64 in
    JSON.

    Shares are scaled to 0 to 255, and at least 1 where the count is not 0.
    """

    active: bytes = b""
    """u1: share of the rows that requests hold."""
    cached: bytes = b""
    """u1: share of the rows that are cached for later prompts and held by no request."""
    shared: bytes = b""
    """u1: share of the rows that several requests hold."""
    filled: bytes = b""
    """u1: share of the slots that hold a token."""
    owner: bytes = b""
    """i4: the newest request that owns a row of the bin, or -1."""


class CarriedStep(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The step that ended first in a second, if it started before that second: its tokens were computed in both."""

    before_ns: int = 0
    """Time from the step's start to the start of the second in which it ended."""
    length_ns: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Summary of the second that starts at `time_ns`.

    Counts are of this second (tokens: of steps that ended in it). `num_...` and `..._blocks` without a verb are levels
    at its end, `peak_...` are maxima within it. -1: unknown.
    """

    time_ns: int
    """Start of the second on the recording's clock, in nanoseconds since 1970."""
    epoch: int
    step: int = 0
    num_steps: int = 0
    num_lost_frames: int = 0
    num_running: int = 0
    num_waiting: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    """Blocks that can be allocated without evicting cached ones; fewer than the free rows if not every
    row has memory.
    """
    shared_blocks: int = 0
    """Blocks that several requests hold."""
    host_blocks: int = 0
    disk_blocks: int = 0
    used_slots: int = 0
    """Slots of active blocks that hold a token."""
    longest_free_run: int = 0
    num_free_runs: int = 0
    free_runs: tuple[int, ...] = ()
    """Number of runs with 1, 2 to 3, 4 to 7, ... blocks."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    """Token counts as defined in `messages.telemetry.Counters`, like `prefill_tokens` and `decode_tokens`."""
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
    """Latencies as defined in `latencies`, like `first_token` and `inter_token`."""
    utilization: float = -1.0
    power_watts: float = -1.0
    temperature_celsius: float = -1.0
    process_bytes: int = -1
    memory_used_bytes: int = -1
    num_rows: int = 0
    bins: AddressBins | None = None
    """Address bins; None if they are those of the previous second."""
    longest_wait_s: float = -1.0
    """Longest current wait of a request for its first step; 0 if none waits."""
    stalled_s: float = -1.0
    """Time since the last completed step while there are unfinished requests, from the engine's heartbeats. 0 if there
    are none, or while the engine is paused.
    """
    phases: bytes | None = None
    """Phases of requests that no event reports (`request_phases.PHASE`); None if they were not recorded."""
    pool_blocks: int = -1
    """Number of blocks in the pool, if active, cached and free ones are not all known; otherwise -1, and their sum
    applies.
    """
    draft_tokens: int = 0
    """Draft tokens that were verified. `accepted_tokens` of them were accepted."""
    accepted_tokens: int = 0
    flops: int = 0
    """Minimum floating-point operations of the steps' forward passes, and `moved_bytes` the minimum bytes moved.
    Divided by `forward_ns`, they are the achieved rates.
    """
    moved_bytes: int = 0
    stops: tuple[Stop, ...] = ()
    """Stops of the engine on the recording's clock: those that ended in the second, each as a whole, and the elapsed
    part of a current one. The first summary of an engine start also has the earlier ones.
    """
    prompt_tokens: int = -1
    generation_tokens: int = -1
    restored_tokens: int = -1
    recomputed_tokens: int = -1
    """Counts as defined in `messages.telemetry.Counters`, like `prompt_tokens`, `generation_tokens` and
    `restored_tokens`.
    """
    moments: bytes | None = None
    """When requests first ran and got their first token (`moments.RequestMoment`); None if not recorded."""
    peak_active_blocks: int = -1
    peak_active_ns: int = -1
    """Time from the start of the second until `peak_active_blocks` was first reached."""
    peak_running: int = -1
    peak_running_ns: int = -1
    peak_waiting: int = -1
    peak_waiting_ns: int = -1
    held_slots: int = -1
    """Slots that requests hold. `wasted_slots` of them are unused (`mirror.pool_use`)."""
    wasted_slots: int = -1
    carried_step: CarriedStep | None = None


class TimedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event, with its time on the recording's clock."""

    time_ns: int
    epoch: int
    event: Event


class TimedEvents(msgspec.Struct, frozen=True, gc=False):
    """Events of some seconds in one message. Thousands of small messages would have more overhead than content."""

    events: list[TimedEvent]


_Item = TypeVar("_Item")
_summaries: Final = msgspec.json.Decoder(Summary)
_events: Final = msgspec.json.Decoder(TimedEvent)
_event_lists: Final = msgspec.json.Decoder(TimedEvents)
_encoder: Final = msgspec.json.Encoder()


def encode(item: Summary | TimedEvent) -> bytes:
    return _encoder.encode(item)


def join_events(encoded: Iterable[bytes]) -> bytes:
    """Join events, each encoded by `encode`, into an encoded `TimedEvents`."""
    return b'{"events":[' + b",".join(encoded) + b"]}"


def decode_event_list(data: bytes) -> list[TimedEvent]:
    """Parse an encoded `TimedEvents`. Raises ProtocolError if it is invalid."""
    return _decoded(_event_lists, data, MAX_LIST_BYTES).events


def decode_summary(data: bytes) -> Summary:
    return _decoded(_summaries, data)


def decode_event(data: bytes) -> TimedEvent:
    return _decoded(_events, data)


def schema_of(kind: type[msgspec.Struct]) -> bytes:
    return msgspec.json.encode(msgspec.json.schema(kind))


def _decoded(decoder: msgspec.json.Decoder[_Item], data: bytes, max_bytes: int = MAX_SUMMARY_BYTES) -> _Item:
    if len(data) > max_bytes:
        raise ProtocolError(f"a summary of {len(data)} bytes: at most {max_bytes} are accepted")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"a summary that cannot be read: {error}") from None

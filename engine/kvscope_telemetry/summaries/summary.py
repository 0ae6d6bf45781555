"""Summary of one second of a session, small enough that a reader can load hours of summaries together.

Defines the contents of summaries and their encoding in a recording (JSON, with a schema). `summarizer` computes
summaries; `session_overview` collects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Event, Stop

SECOND_NS: Final = 1_000_000_000
MAX_BINS: Final = 1_024
"""Maximum number of address bins. A ledger with fewer rows has one bin per row."""
MAX_SUMMARY_BYTES: Final = 1 << 20
MAX_LIST_BYTES: Final = 4 * MAX_SUMMARY_BYTES


class Latency(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Percentiles of the latencies that were complete in the second; -1 if there were none."""

    count: int = 0
    p50_s: float = -1.0
    p95_s: float = -1.0
    p99_s: float = -1.0
    p50_above_s: float = -1.0
    """Lower bound of the 50th percentile, for an engine that reports a histogram. The percentile is above this and at
    most `p50_s`, which is -1 if there is no upper bound.

    If this field is -1, the percentile is exactly `p50_s`. `p95_above_s` and `p99_above_s` are defined in the same way.
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
    """Share of the bin's ledger rows that requests hold, as u1."""
    cached: bytes = b""
    """Share of the bin's ledger rows that are cached for later prompts and held by no request, as u1."""
    shared: bytes = b""
    """Share of the bin's ledger rows that several requests hold, as u1."""
    filled: bytes = b""
    """Share of the bin's token slots that hold a token, as u1."""
    owner: bytes = b""
    """Number of the newest request that owns a row of the bin, or -1, as i4."""


class CarriedStep(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The first step that ended in a second, if it started before that second. Its tokens were then computed
    partly in earlier seconds.
    """

    before_ns: int = 0
    """Time from the step's start to the start of the second in which it ended."""
    length_ns: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Summary of the second that starts at `time_ns`.

    Fields are counts of this second, except that `num_...` and `..._blocks` without a verb are levels at its end, and
    `peak_...` are maxima within it. Tokens count in the second in which their step ended. -1 means unknown.
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
    """Blocks that can be allocated without evicting cached ones. Smaller than the number of free ledger rows if
    some rows have no memory.
    """
    shared_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    used_slots: int = 0
    """Slots of active blocks that hold a token."""
    longest_free_run: int = 0
    num_free_runs: int = 0
    free_runs: tuple[int, ...] = ()
    """Number of runs of free blocks by length: 1, 2 to 3, 4 to 7, and so on."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    """Tokens found in the prefix cache. This field, `prefill_tokens` and `decode_tokens` count the same as the
    fields of these names in `messages.telemetry.Counters`.
    """
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
    """Queue times of requests. Queue time, and the latencies in `first_token` and `inter_token`, are defined in
    `latencies`.
    """
    utilization: float = -1.0
    power_watts: float = -1.0
    temperature_celsius: float = -1.0
    process_bytes: int = -1
    memory_used_bytes: int = -1
    num_rows: int = 0
    bins: AddressBins | None = None
    """Address bins; None if they are those of the previous second."""
    longest_wait_s: float = -1.0
    """Longest time that a request has waited for its first step, as of the end of the second; 0 if no request waits."""
    stalled_s: float = -1.0
    """Time since the last completed step while there are unfinished requests, from the engine's heartbeats. 0
    if all requests are finished or the engine is paused.
    """
    phases: bytes | None = None
    """Phases of requests that no event reports (`request_phases.PHASE`); None if they were not recorded."""
    pool_blocks: int = -1
    """Number of blocks in the pool if the numbers of active, cached and free blocks are not all known.
    Otherwise -1, and their sum is the size of the pool.
    """
    draft_tokens: int = 0
    """Draft tokens that were verified. `accepted_tokens` of them were accepted."""
    accepted_tokens: int = 0
    flops: int = 0
    """Minimum number of floating-point operations of the steps' forward passes. `moved_bytes` is the minimum
    number of bytes moved. Divided by `forward_ns`, they are the achieved rates.
    """
    moved_bytes: int = 0
    stops: tuple[Stop, ...] = ()
    """Pauses and suspensions of the engine, on the recording's clock: those that ended during the summary's second, and
    the elapsed part of one that had not ended by then.

    The first summary of an engine start also contains all earlier ones of that start.
    """
    prompt_tokens: int = -1
    generation_tokens: int = -1
    restored_tokens: int = -1
    recomputed_tokens: int = -1
    """Recomputed tokens. This field, `prompt_tokens`, `generation_tokens` and `restored_tokens` count the same
    as the fields of these names in `messages.telemetry.Counters`.
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
    """Join events, each already encoded by `encode`, into an encoded `TimedEvents`."""
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

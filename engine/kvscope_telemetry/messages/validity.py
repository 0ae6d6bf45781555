"""Checks of decoded telemetry messages that types alone cannot express.

Checks that packed columns have equal lengths, values are in range, and numbers fit the mirror's columns. Must not
depend on sockets or on earlier messages: the mirror checks whether a block id exists. All checks raise ProtocolError
with one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import isfinite
from struct import unpack
from typing import Final

from msgspec.structs import astuple

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, OPTIONAL, BlockRows, num_hashed
from kvscope_telemetry.messages.devices import Devices, check_devices
from kvscope_telemetry.messages.telemetry import (
    NO_WORK,
    PROTOCOL_VERSION,
    Batch,
    DeltaCheckpoint,
    DeviceSample,
    Event,
    Fingerprints,
    Frame,
    Heartbeat,
    Hello,
    MemoryBreakdown,
    Progress,
    Reading,
    RequestInfo,
    RequestRows,
    Snapshot,
    Stop,
    TelemetryMessage,
)

MAX_BLOCKS: Final = 64 << 20
"""Maximum number of blocks; larger numbers are treated as errors."""
MAX_BLOCK_SIZE: Final = (1 << 16) - 1  # the ledger counts filled slots in a u16
MAX_GROUPS: Final = 256
"""Maximum number of KV groups, limited by the ledger's `group` column, a u8."""
MAX_U32: Final = (1 << 32) - 1
MAX_I64: Final = (1 << 63) - 1
MAX_TIME_NS: Final = 1 << 62
"""Maximum time, 146 years: the sum of two times still fits an i64."""
MAX_SPAN_NS: Final = 366 * 86_400_000_000_000
"""Maximum duration. It is a year, because measured durations include the time for which a process is suspended."""
MAX_AHEAD_NS: Final = 86_400_000_000_000
"""Maximum time by which an event, or the arrival of a request, may lie after the message that contains it: one day."""

_ID_BYTES: Final = 4
_COLUMN_BYTES: Final = tuple(COLUMNS[name].itemsize for name in DENSE)
_REQUEST_BYTES: Final = (4, 1, 4, 4, 4, 2, 4, 4)  # number to table_count
_PARENT_BYTES: Final = COLUMNS["parent"].itemsize
_NO_BLOCK_ROWS: Final = BlockRows()


def check(message: TelemetryMessage) -> None:
    """Raise ProtocolError if `message` contradicts itself or is out of range."""
    if isinstance(message, DeltaCheckpoint):
        check_delta_checkpoint(message)
    elif isinstance(message, Frame):
        check_frame(message)
    elif isinstance(message, Heartbeat):
        _counts("Heartbeat", (message.epoch, message.seq, message.step, message.num_unfinished))
        _counts("Heartbeat", (message.max_num_seqs, message.max_num_batched_tokens))
        _counts("Heartbeat", (message.time_ns, message.step_started_ns), MAX_TIME_NS)
        if len(message.pinned) % _ID_BYTES:
            raise ProtocolError("Heartbeat: pinned blocks are not a whole number of u32")
    elif isinstance(message, Hello):
        check_hello(message)
    elif isinstance(message, Snapshot):
        check_snapshot(message)
    elif isinstance(message, Progress):
        _counts("Progress", (message.done, message.total))
    elif isinstance(message, Reading):
        check_reading(message)
    elif isinstance(message, Devices):
        check_devices(message)
    elif isinstance(message, Fingerprints):
        _check_fingerprints(message)
    else:  # DeviceSample, MemoryBreakdown, Goodbye: -1 is "unknown" in the first two
        _counts(type(message).__name__, (message.epoch,))
        if isinstance(message, DeviceSample | MemoryBreakdown):
            _counts(type(message).__name__, (message.time_ns,), MAX_TIME_NS)


def _check_fingerprints(message: Fingerprints) -> None:
    _counts("Fingerprints", (message.epoch, message.step, message.time_ns, message.num_layers))
    blocks, tokens = len(message.number) // 4, len(message.sampled_number) // 4
    lengths = tuple(map(len, (message.number, message.place, message.digests)))
    if lengths != (4 * blocks, 4 * blocks, 8 * blocks * message.num_layers):
        raise ProtocolError(
            f"Fingerprints: columns of {lengths} bytes are not whole rows of {message.num_layers} layers"
        )
    lengths = tuple(map(len, (message.sampled_number, message.sampled_place, message.logit_sums)))
    if lengths != (4 * tokens, 4 * tokens, 8 * tokens):
        raise ProtocolError(f"Fingerprints: columns of {lengths} bytes are not whole rows of sampled tokens")


def check_frame(frame: Frame) -> None:
    batch = frame.batch
    position = (frame.seq - 1, frame.epoch, frame.step, frame.time_ns)
    _counts("Frame", position + astuple(frame.counters))
    _counts("Frame", (batch.num_prefill_tokens, batch.num_decode_tokens), MAX_U32)
    _counts("Frame", (frame.time_ns,), MAX_TIME_NS)
    _counts("Timings", astuple(frame.timings), MAX_SPAN_NS)
    if frame.work is not NO_WORK:
        _counts("Frame", (*astuple(frame.work), frame.work.num_bytes))
    _check_changed_blocks(frame.blocks)
    _check_request_rows(frame.requests)
    _check_batch(batch)
    for info in frame.new_requests:
        _check_request_info(info, frame.time_ns)
    for event in frame.events:
        _check_event(event, frame.time_ns)
    if any(len(ids) % _ID_BYTES for ids in astuple(frame.moves)):
        raise ProtocolError("Frame: moved blocks are not a whole number of u32")
    if len(frame.first_token_ns) % 8 or len(frame.inter_token_ns) % 8:
        raise ProtocolError("Frame: token times are not a whole number of u64")
    for packed in filter(None, (frame.first_token_ns, frame.inter_token_ns)):
        _counts("Frame", unpack(f"<{len(packed) // 8}Q", packed), MAX_SPAN_NS)


def check_delta_checkpoint(checkpoint: DeltaCheckpoint) -> None:
    check_frame(checkpoint)
    if not 0 <= checkpoint.since_seq < checkpoint.seq:
        raise ProtocolError(f"a delta checkpoint from frame {checkpoint.since_seq} to frame {checkpoint.seq}")


def check_reading(reading: Reading) -> None:
    """Raise ProtocolError unless all figures are finite, and each histogram has ascending bounds and one count
    more than bounds.
    """
    _counts("Reading", (reading.epoch,))
    _counts("Reading", (reading.time_ns,), MAX_TIME_NS)
    if not all(isfinite(figure.value) for figure in reading.figures):
        raise ProtocolError("Reading: a figure is no number")
    for histogram in reading.latencies:
        if len(histogram.bounds_ns) % 8 or len(histogram.counts) != len(histogram.bounds_ns) + 8:
            raise ProtocolError(f"Reading: the bounds and counts of {histogram.kind:.40} do not go together")
        bounds = unpack(f"<{len(histogram.bounds_ns) // 8}Q", histogram.bounds_ns)
        if any(a >= b for a, b in pairwise(bounds)) or (bounds and bounds[-1] > MAX_I64):
            raise ProtocolError(f"Reading: the bounds of {histogram.kind:.40} do not ascend")


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError for a protocol version or a pool that this version cannot mirror."""
    if not 1 <= hello.protocol_version <= PROTOCOL_VERSION:
        raise ProtocolError(
            f"the engine speaks protocol {hello.protocol_version}, this version up to {PROTOCOL_VERSION}"
        )
    if not 1 <= hello.cache.num_blocks <= MAX_BLOCKS:
        raise ProtocolError(f"Hello: num_blocks={hello.cache.num_blocks} is not from 1 to {MAX_BLOCKS}")
    lower_tiers = (hello.cache.num_host_blocks, hello.cache.num_disk_blocks)
    if min(lower_tiers) < 0 or max(lower_tiers) > MAX_BLOCKS:
        raise ProtocolError(f"Hello: {lower_tiers} places in host memory and on disk are not from 0 to {MAX_BLOCKS}")
    states = (hello.cache.num_states, hello.cache.num_host_states)
    if min(states) < 0 or max(states) > MAX_BLOCKS:
        raise ProtocolError(
            f"Hello: {states} recurrent states, there and in host memory, are not from 0 to {MAX_BLOCKS}"
        )
    for size in (hello.cache.block_size, *hello.cache.block_sizes):
        if not 1 <= size <= MAX_BLOCK_SIZE:
            raise ProtocolError(f"Hello: block_size={size} is not from 1 to {MAX_BLOCK_SIZE}")
    if len(hello.cache.groups) > MAX_GROUPS:
        raise ProtocolError(f"Hello: {len(hello.cache.groups)} KV groups, at most {MAX_GROUPS} are accepted")
    if not 0 <= hello.cache.num_reserved_blocks <= hello.cache.num_blocks:
        raise ProtocolError(f"Hello: {hello.cache.num_reserved_blocks} of {hello.cache.num_blocks} blocks are reserved")
    if not 0 <= hello.cache.slot_blocks <= hello.cache.num_blocks:
        raise ProtocolError(
            f"Hello: slot_blocks={hello.cache.slot_blocks} is not from 0 to num_blocks={hello.cache.num_blocks}"
        )
    _counts("Hello", (hello.epoch, hello.time_ns, hello.wall_time_ns, hello.cache.block_bytes))
    _counts("Hello", (hello.cache.hit_tokens, hello.device.read_bytes_per_s, hello.device.flops_per_s))


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise ProtocolError unless the snapshot has all rows of the pool and complete requests.

    More rows than declared in the hello are accepted: they belong to a tier introduced by a later version.
    """
    check_hello(snapshot.hello)
    _counts("Snapshot", (snapshot.seq, snapshot.step, *astuple(snapshot.counters)))
    _counts("Snapshot", (snapshot.time_ns,), MAX_TIME_NS)
    if snapshot.blocks.ids:
        raise ProtocolError("Snapshot: block ids are given, all rows in order are expected")
    _check_columns("Snapshot", snapshot.blocks, max(snapshot.hello.cache.num_rows, len(snapshot.blocks.state)))
    _check_request_rows(snapshot.requests)
    for info in snapshot.requests_info:
        _check_request_info(info, snapshot.time_ns)
    for stop in snapshot.stops:
        check_stop(stop)


def check_stop(stop: Stop) -> None:
    """Raise ProtocolError unless `stop` ends after it began, or has not ended."""
    has_ended = stop.begin_ns < stop.end_ns <= MAX_I64
    if stop.begin_ns < 0 or not (has_ended or (stop.end_ns == 0 and stop.begin_ns <= MAX_I64)):
        raise ProtocolError(
            f"Stop: begin_ns {stop.begin_ns} and end_ns {stop.end_ns} are invalid: the end must be 0 or after the"
            " begin, both from 0 to 2^63 - 1"
        )


def _check_changed_blocks(rows: BlockRows) -> None:
    if rows == _NO_BLOCK_ROWS:
        return
    if len(rows.ids) % _ID_BYTES:
        raise ProtocolError(f"Frame: {len(rows.ids)} bytes of block ids are not a whole number of u32")
    _check_columns("Frame", rows, len(rows.ids) // _ID_BYTES)


def _check_columns(where: str, rows: BlockRows, num_rows: int) -> None:
    lengths = tuple(map(len, astuple(rows)))[1 : 1 + len(DENSE)]  # without ids
    expected = tuple([num_rows * size for size in _COLUMN_BYTES])
    if lengths != expected:
        raise ProtocolError(f"{where}: block columns of {lengths} bytes where {num_rows} rows are {expected}")
    if rows.parent and len(rows.parent) != (needed := _PARENT_BYTES * num_hashed(rows)):
        raise ProtocolError(f"{where}: {len(rows.parent)} bytes of parents where rows with a hash have {needed}")
    for name in OPTIONAL:
        packed: bytes = getattr(rows, name)
        if packed and len(packed) != (needed := num_rows * COLUMNS[name].itemsize):
            raise ProtocolError(f"{where}: {len(packed)} bytes of {name} where {num_rows} rows are {needed}")


def _check_request_rows(rows: RequestRows) -> None:
    *columns, table_blocks, drafts, accepted, groups, waits = map(len, astuple(rows))
    num_rows = columns[0] // 4
    expected = [num_rows * size for size in _REQUEST_BYTES]
    if columns != expected:
        raise ProtocolError(f"request columns of {columns} bytes where {num_rows} rows are {expected}")
    if not {drafts, accepted, groups, waits} <= {0, 4 * num_rows}:
        raise ProtocolError(
            f"request columns of {drafts} (draft tokens), {accepted} (accepted tokens), {groups} (KV groups) and "
            f"{waits} (reasons for waiting) bytes: each must have 0 or, for {num_rows} rows, {4 * num_rows}"
        )
    if not num_rows:
        if table_blocks:
            raise ProtocolError("a block table without a request")
        return
    if 4 * sum(unpack(f"<{num_rows}I", rows.table_count)) != table_blocks:
        raise ProtocolError(f"block tables of {table_blocks} bytes do not match their table_count")


def _check_batch(batch: Batch) -> None:
    if len(batch.number) != len(batch.num_tokens) or len(batch.number) % 4:
        raise ProtocolError(
            f"Batch: columns of {len(batch.number)} and {len(batch.num_tokens)} bytes are not rows of u32"
        )


def _check_request_info(info: RequestInfo, now_ns: int) -> None:
    counts = (info.num_prompt_tokens, info.max_tokens, info.index, info.client)
    has_counts = min(counts) >= 0 and max(counts) < MAX_U32
    if not (has_counts and 1 <= info.number <= MAX_U32):
        raise ProtocolError(f"RequestInfo: number={info.number} or a count of it is not a u32")
    if not 0 <= info.arrival_ns <= now_ns + MAX_AHEAD_NS or not -(1 << 31) <= info.priority < 1 << 31:
        raise ProtocolError(f"RequestInfo {info.number}: arrival_ns or priority is out of range")


def _check_event(event: Event, now_ns: int) -> None:
    _counts("Event", (event.number, event.other, event.num_blocks, event.num_tokens))
    _counts("Event", (event.time_ns,), now_ns + MAX_AHEAD_NS)
    if event.data is not None:
        spans = (event.data.waited_ns, event.data.stopped_ns, event.data.lasted_ns, event.data.slept_ns)
        _counts("Event", spans, MAX_SPAN_NS)
        for value in astuple(event.data):
            if isinstance(value, int) and not -MAX_I64 <= value <= MAX_I64:
                raise ProtocolError(f"Event: a number of its data is {value}, beyond 2^63")


def _counts(where: str, values: Iterable[int], at_most: int = MAX_I64) -> None:
    values = tuple(values)
    if min(values) < 0 or max(values) > at_most:
        wrong = next(value for value in values if not 0 <= value <= at_most)
        limit = "2^63" if at_most == MAX_I64 else f"{at_most:,}"
        raise ProtocolError(f"{where}: the number {wrong} is negative or above {limit}")

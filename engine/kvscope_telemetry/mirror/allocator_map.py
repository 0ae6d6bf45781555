"""Segments and blocks of torch's allocator: conversion to and from the columns of `AllocatorMap`.

Owns the meaning of the columns and the maximum number of blocks sent, beyond which small blocks are merged. Must not
depend on torch or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import AllocatorMap

MAX_SEGMENTS: Final = 8192
MAX_BLOCKS: Final = 32_768
_MAX_BYTES: Final = 1 << 60
"""Maximum size of a segment in bytes; larger ones are treated as errors."""
Sizes = npt.NDArray[np.int64]
States = npt.NDArray[np.uint8]


class AllocatorPool(IntEnum):
    SMALL = 0
    LARGE = 1
    PRIVATE = 2


class State(IntEnum):
    ALLOCATED = 0
    PENDING = 1
    """Freed, but a stream may still use it."""
    CACHED = 2
    JOINED = 3
    """Adjacent small blocks of several states, merged into one."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchSegment:
    """A segment that torch allocated from the device. Sizes are bytes; arrays have one element per block."""

    address: int
    num_bytes: int
    stream: int
    pool: int
    """An `AllocatorPool`, or a number introduced by a later version."""
    offsets: Sizes
    sizes: Sizes
    states: States

    def bytes_of(self, state: State) -> int:
        return int(self.sizes[self.states == state].sum())

    @property
    def largest_cached(self) -> int:
        return int(self.sizes[self.states == State.CACHED].max(initial=0))


def pack_map(
    segments: Sequence[TorchSegment],
    *,
    tag: int = 0,
    device: str = "",
    took_ns: int = 0,
    max_blocks: int = MAX_BLOCKS,
    max_segments: int = MAX_SEGMENTS,
) -> AllocatorMap:
    """Return the answer to GetAllocatorMap, with the largest segments first.

    Beyond `max_blocks`, the smallest adjacent blocks are merged; beyond `max_segments`, the smallest segments are left
    out.
    """
    largest_segments = sorted(segments, key=lambda segment: (-segment.num_bytes, segment.address))[:max_segments]
    merged = _merge_small_blocks(largest_segments, max_blocks)
    return AllocatorMap(
        tag=tag,
        device=device,
        took_ns=took_ns,
        segment_address=_pack_numbers([segment.address for segment in merged], "<u8"),
        segment_bytes=_pack_numbers([segment.num_bytes for segment in merged], "<u8"),
        segment_stream=_pack_numbers([segment.stream for segment in merged], "<u8"),
        segment_pool=_pack_numbers([segment.pool for segment in merged], "<u1"),
        segment_num_blocks=_pack_numbers([len(segment.sizes) for segment in merged], "<u4"),
        block_offset=b"".join(segment.offsets.astype("<u8").tobytes() for segment in merged),
        block_bytes=b"".join(segment.sizes.astype("<u8").tobytes() for segment in merged),
        block_state=b"".join(segment.states.tobytes() for segment in merged),
        num_segments=len(segments),
        num_blocks=sum(len(segment.sizes) for segment in segments),
        total_bytes=sum(segment.num_bytes for segment in segments),
        allocated_bytes=sum(segment.bytes_of(State.ALLOCATED) for segment in segments),
        pending_bytes=sum(segment.bytes_of(State.PENDING) for segment in segments),
        cached_bytes=sum(segment.bytes_of(State.CACHED) for segment in segments),
        split_bytes=sum(segment.bytes_of(State.CACHED) for segment in segments if len(segment.sizes) > 1),
        largest_cached_bytes=max((segment.largest_cached for segment in segments), default=0),
    )


def unpack_map(allocator_map: AllocatorMap) -> list[TorchSegment]:
    """Return the segments in the given order. Raises ProtocolError if the columns contradict each other."""
    addresses, sizes = _column(allocator_map.segment_address, "<u8"), _column(allocator_map.segment_bytes, "<u8")
    streams, pools = _column(allocator_map.segment_stream, "<u8"), _column(allocator_map.segment_pool, "<u1")
    counts = _column(allocator_map.segment_num_blocks, "<u4")
    offsets, lengths = _column(allocator_map.block_offset, "<u8"), _column(allocator_map.block_bytes, "<u8")
    states = _column(allocator_map.block_state, "<u1")
    _check(len({len(addresses), len(sizes), len(streams), len(pools), len(counts)}) == 1, "columns of segments differ")
    _check(len({len(offsets), len(lengths), len(states)}) == 1, "columns of blocks differ")
    _check(int(counts.sum(dtype=np.uint64)) == len(states), "blocks are not those of the segments")
    for column in (sizes, offsets, lengths):
        _check(bool((column <= _MAX_BYTES).all()), f"more than {_MAX_BYTES} bytes in a segment")
    _check(
        min(
            allocator_map.total_bytes,
            allocator_map.cached_bytes,
            allocator_map.num_blocks,
            allocator_map.largest_cached_bytes,
        )
        >= 0,
        "a negative total",
    )
    begins, ends = offsets.astype(np.int64), (offsets + lengths).astype(np.int64)
    segments, start = [], 0
    for row, count in enumerate(counts.tolist()):
        part = slice(start, start + count)
        start += count
        block_begins, block_ends = begins[part], ends[part]
        _check(bool((block_ends <= int(sizes[row])).all()), "a block beyond the end of its segment")
        _check(bool((block_begins[1:] >= block_ends[:-1]).all()), "blocks that overlap")
        segment = TorchSegment(
            int(addresses[row]),
            int(sizes[row]),
            int(streams[row]),
            int(pools[row]),
            block_begins,
            block_ends - block_begins,
            states[part].astype(np.uint8),
        )
        segments.append(segment)
    return segments


def _merge_small_blocks(segments: list[TorchSegment], max_blocks: int) -> list[TorchSegment]:
    """Merge adjacent small blocks until at most `max_blocks` remain, or one per segment.

    Blocks up to a size limit are merged; the limit is doubled until that suffices.
    """
    size, merged = 1, segments
    largest = max((segment.num_bytes for segment in segments), default=0)
    while sum(len(segment.sizes) for segment in merged) > max_blocks and size < largest:
        size *= 2
        merged = [_merge_up_to(segment, size) for segment in segments]
    return merged


def _merge_up_to(segment: TorchSegment, size: int) -> TorchSegment:
    is_small = segment.sizes <= size
    begins = (
        np.flatnonzero(np.concatenate(([True], ~(is_small[1:] & is_small[:-1])))) if len(is_small) else np.arange(0)
    )
    if len(begins) == len(is_small):
        return segment
    ends = np.concatenate((begins[1:], [len(is_small)])) - 1
    offsets = segment.offsets[begins]
    sizes = segment.offsets[ends] + segment.sizes[ends] - offsets
    lowest, highest = np.minimum.reduceat(segment.states, begins), np.maximum.reduceat(segment.states, begins)
    states = np.where(lowest == highest, lowest, np.uint8(State.JOINED)).astype(np.uint8)
    return TorchSegment(segment.address, segment.num_bytes, segment.stream, segment.pool, offsets, sizes, states)


def _pack_numbers(values: list[int], kind: str) -> bytes:
    return np.array(values, kind).tobytes()


def _column(data: bytes, kind: str) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    column = np.dtype(kind)
    _check(len(data) % column.itemsize == 0, "half a number in a column")
    return np.frombuffer(data, column)


def _check(condition: bool, fault: str) -> None:
    if not condition:
        raise ProtocolError(f"AllocatorMap: {fault}")

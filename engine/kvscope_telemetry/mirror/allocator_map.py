"""Segments and blocks of torch's allocator: conversion to and from the columns of `AllocatorMap`.

Owns the meaning of the columns, the maximum number of blocks sent, and the merging of small blocks beyond it. Must not
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
"""Larger segments are treated as errors."""
Sizes = npt.NDArray[np.int64]
States = npt.NDArray[np.uint8]


class AllocatorPool(IntEnum):
    """Pool of torch's allocator that a segment belongs to."""

    SMALL = 0
    LARGE = 1
    PRIVATE = 2


class State(IntEnum):
    ALLOCATED = 0
    PENDING = 1
    """Freed, and waiting for a stream that may still use it."""
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
        """Return the bytes in blocks of this state."""
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
    """Return the answer to GetAllocatorMap with the largest segments first; beyond `max_blocks`, the smallest adjacent
    blocks are merged.
    """
    kept = sorted(segments, key=lambda one: (-one.num_bytes, one.address))[:max_segments]
    joined = _joined(kept, max_blocks)
    return AllocatorMap(
        tag=tag,
        device=device,
        took_ns=took_ns,
        segment_address=_packed([one.address for one in joined], "<u8"),
        segment_bytes=_packed([one.num_bytes for one in joined], "<u8"),
        segment_stream=_packed([one.stream for one in joined], "<u8"),
        segment_pool=_packed([one.pool for one in joined], "<u1"),
        segment_num_blocks=_packed([len(one.sizes) for one in joined], "<u4"),
        block_offset=b"".join(one.offsets.astype("<u8").tobytes() for one in joined),
        block_bytes=b"".join(one.sizes.astype("<u8").tobytes() for one in joined),
        block_state=b"".join(one.states.tobytes() for one in joined),
        num_segments=len(segments),
        num_blocks=sum(len(one.sizes) for one in segments),
        total_bytes=sum(one.num_bytes for one in segments),
        allocated_bytes=sum(one.bytes_of(State.ALLOCATED) for one in segments),
        pending_bytes=sum(one.bytes_of(State.PENDING) for one in segments),
        cached_bytes=sum(one.bytes_of(State.CACHED) for one in segments),
        split_bytes=sum(one.bytes_of(State.CACHED) for one in segments if len(one.sizes) > 1),
        largest_cached_bytes=max((one.largest_cached for one in segments), default=0),
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
        "less than none",
    )
    places, ends = offsets.astype(np.int64), (offsets + lengths).astype(np.int64)
    segments, start = [], 0
    for row, count in enumerate(counts.tolist()):
        part = slice(start, start + count)
        start += count
        first, last = places[part], ends[part]
        _check(bool((last <= int(sizes[row])).all()), "a block beyond the end of its segment")
        _check(bool((first[1:] >= last[:-1]).all()), "blocks that overlap")
        one = TorchSegment(
            int(addresses[row]),
            int(sizes[row]),
            int(streams[row]),
            int(pools[row]),
            first,
            last - first,
            states[part].astype(np.uint8),
        )
        segments.append(one)
    return segments


def _joined(segments: list[TorchSegment], max_blocks: int) -> list[TorchSegment]:
    """Merge adjacent blocks up to a size that is doubled until few enough are left (at least one per segment)."""
    size, joined = 1, segments
    largest = max((one.num_bytes for one in segments), default=0)
    while sum(len(one.sizes) for one in joined) > max_blocks and size < largest:
        size *= 2
        joined = [_joined_up_to(one, size) for one in segments]
    return joined


def _joined_up_to(one: TorchSegment, size: int) -> TorchSegment:
    small = one.sizes <= size
    begins = np.flatnonzero(np.concatenate(([True], ~(small[1:] & small[:-1])))) if len(small) else np.arange(0)
    if len(begins) == len(small):
        return one
    ends = np.concatenate((begins[1:], [len(small)])) - 1
    offsets = one.offsets[begins]
    sizes = one.offsets[ends] + one.sizes[ends] - offsets
    lowest, highest = np.minimum.reduceat(one.states, begins), np.maximum.reduceat(one.states, begins)
    states = np.where(lowest == highest, lowest, np.uint8(State.JOINED)).astype(np.uint8)
    return TorchSegment(one.address, one.num_bytes, one.stream, one.pool, offsets, sizes, states)


def _packed(values: list[int], kind: str) -> bytes:
    return np.array(values, kind).tobytes()


def _column(data: bytes, kind: str) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    column = np.dtype(kind)
    _check(len(data) % column.itemsize == 0, "half a number in a column")
    return np.frombuffer(data, column)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(f"AllocatorMap: {otherwise}")

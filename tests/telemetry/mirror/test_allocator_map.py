"""Torch's allocator segments over the wire: round trip, and merging of blocks beyond the limit with unchanged
totals.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import AllocatorMap
from kvscope_telemetry.messages.wire import decode_reply, encode
from kvscope_telemetry.mirror.allocator_map import AllocatorPool, State, TorchSegment, pack_map, unpack_map

_BLOCK = st.tuples(st.integers(1, 1 << 22), st.sampled_from((State.ALLOCATED, State.PENDING, State.CACHED)))


def segment(blocks: list[tuple[int, State]], address: int = 1 << 40, stream: int = 0) -> TorchSegment:
    sizes = np.array([size for size, _ in blocks], np.int64)
    offsets = np.cumsum(sizes) - sizes
    states = np.array([state for _, state in blocks], np.uint8)
    return TorchSegment(address, int(sizes.sum()), stream, AllocatorPool.LARGE, offsets, sizes, states)


def said(segments: list[TorchSegment]) -> list[tuple[object, ...]]:
    return [
        (s.address, s.num_bytes, s.stream, s.pool, s.offsets.tolist(), s.sizes.tolist(), s.states.tolist())
        for s in segments
    ]


@given(st.lists(st.lists(_BLOCK, min_size=1, max_size=9), max_size=6))
def test_allocator_map_unpacked_after_packing_is_equal(blocks: list[list[tuple[int, State]]]) -> None:
    segments = [segment(part, address=(n + 1) << 40, stream=n << 33) for n, part in enumerate(blocks)]
    reply = decode_reply(encode(pack_map(segments, tag=4, device="cuda:1")))
    assert isinstance(reply, AllocatorMap)
    assert said(unpack_map(reply)) == said(sorted(segments, key=lambda one: (-one.num_bytes, one.address)))
    assert reply.allocated_bytes + reply.pending_bytes + reply.cached_bytes == reply.total_bytes
    assert (reply.tag, reply.num_segments, reply.num_blocks) == (4, len(segments), sum(map(len, blocks)))


@given(st.lists(st.lists(_BLOCK, min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 40))
def test_smallest_allocator_blocks_are_merged_beyond_the_limit(
    blocks: list[list[tuple[int, State]]], most: int
) -> None:
    segments = [segment(part, address=(n + 1) << 40) for n, part in enumerate(blocks)]
    whole, bounded = pack_map(segments), pack_map(segments, max_blocks=most)
    drawn = unpack_map(bounded)
    assert sum(len(one.sizes) for one in drawn) <= max(most, len(segments))
    assert [int(one.sizes.sum()) for one in drawn] == [one.num_bytes for one in drawn]
    sums = ("num_blocks", "total_bytes", "allocated_bytes", "cached_bytes", "split_bytes", "largest_cached_bytes")
    assert [getattr(bounded, name) for name in sums] == [getattr(whole, name) for name in sums]


def test_merged_allocator_blocks_keep_their_state_if_it_is_the_same() -> None:
    one = segment([(512, State.CACHED), (512, State.CACHED), (1 << 20, State.ALLOCATED), (512, State.CACHED)])
    assert unpack_map(pack_map([one], max_blocks=3))[0].states.tolist() == [State.CACHED, State.ALLOCATED, State.CACHED]
    mixed = segment([(512, State.CACHED), (512, State.ALLOCATED), (1 << 20, State.ALLOCATED)])
    assert unpack_map(pack_map([mixed], max_blocks=2))[0].states.tolist() == [State.JOINED, State.ALLOCATED]


def test_largest_allocator_segments_are_kept_beyond_the_limit() -> None:
    segments = [segment([(size, State.ALLOCATED)], address=size << 30) for size in (1, 5, 3)]
    packed = pack_map(segments, max_segments=2)
    assert [one.num_bytes for one in unpack_map(packed)] == [5, 3]
    assert (packed.num_segments, packed.total_bytes) == (3, 9)


def test_only_cached_blocks_of_segments_in_use_count_as_split() -> None:
    packed = pack_map([segment([(8, State.CACHED)]), segment([(4, State.CACHED), (2, State.ALLOCATED)], address=5)])
    assert (packed.cached_bytes, packed.split_bytes, packed.largest_cached_bytes) == (12, 4, 8)


GOOD = pack_map([segment([(8, State.CACHED), (4, State.ALLOCATED)])])


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_pool": b""},
        {"block_state": b"\0"},
        {"block_bytes": bytes(15)},
        {"segment_num_blocks": b"\3\0\0\0"},
        {"segment_num_blocks": b"\xff" * 4},
        {"block_bytes": b"\xff" * 16},
        {"block_offset": b"\xff" * 16},
        {"block_offset": bytes(16)},
        {"segment_bytes": b"\1" + bytes(7)},
        {"cached_bytes": -1},
    ],
)
def test_allocator_map_with_contradictory_columns_is_refused(changes: dict[str, bytes]) -> None:
    with pytest.raises(ProtocolError, match="AllocatorMap"):
        unpack_map(msgspec.structs.replace(GOOD, **changes))


def test_unknown_state_and_pool_of_a_later_version_are_accepted() -> None:
    later = msgspec.structs.replace(GOOD, block_state=b"\x09\x00", segment_pool=b"\x09")
    assert unpack_map(later)[0].states.tolist() == [9, 0]
    assert unpack_map(later)[0].pool == 9

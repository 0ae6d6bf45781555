"""A made-up map of torch's allocator, for engines that have none."""

from __future__ import annotations

import random

import numpy as np

from kvscope_telemetry.messages.commands import AllocatorMap
from kvscope_telemetry.mirror.allocator_map import AllocatorPool, State, TorchSegment, pack_map

MIB = 1 << 20


def simulated_allocator_map(tag: int) -> AllocatorMap:
    """Return a made-up map of torch's allocator, like that of an engine with a model of some GiB after a while.

    It has weights, a KV pool, activations with gaps, small tensors and a captured graph, and is always the same.
    """
    draw = random.Random(9)
    segments = [_segment(draw, 0, 4096 * MIB, AllocatorPool.LARGE, 4096 * MIB, holes=0.0)]
    segments += [_segment(draw, 1 + n, 640 * MIB, AllocatorPool.LARGE, 48 * MIB, holes=0.05) for n in range(4)]
    segments += [
        _segment(draw, 10 + n, (20 + 40 * n) * MIB, AllocatorPool.LARGE, 12 * MIB, holes=0.5) for n in range(8)
    ]
    segments += [_segment(draw, 20 + n, 2 * MIB, AllocatorPool.SMALL, MIB // 8, holes=0.4) for n in range(12)]
    segments.append(_segment(draw, 40, 256 * MIB, AllocatorPool.PRIVATE, 32 * MIB, holes=0.2))
    return pack_map(segments, tag=tag, device="simulated")


def _segment(
    draw: random.Random, place: int, num_bytes: int, pool: AllocatorPool, most_bytes: int, *, holes: float
) -> TorchSegment:
    sizes: list[int] = []
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(left, most_bytes if not holes else draw.randrange(1, most_bytes // 512 + 1) * 512))
    states = [_state(draw.random(), holes) for _ in sizes]
    offsets = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    address = 0x7F00_0000_0000 + (place << 33)
    return TorchSegment(address, num_bytes, 0, pool, offsets, np.array(sizes, np.int64), np.array(states, np.uint8))


def _state(drawn: float, holes: float) -> State:
    if drawn < holes:
        return State.CACHED
    return State.PENDING if drawn < holes * 1.1 else State.ALLOCATED

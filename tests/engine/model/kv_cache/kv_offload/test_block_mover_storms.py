"""The bytes of blocks after random moves through the tiers, compared with a model that copies immediately."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from kvscope_engine.model.device_memory.host_slab import HostSlab
from kvscope_engine.model.kv_cache.kv_offload.block_copies import BlockCopier, HostBlockCopier
from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.disk_open import open_disk_file
from kvscope_engine.model.kv_cache.kv_offload.disk_tier import DiskTier
from kvscope_engine.model.kv_cache.kv_offload.staged_copies import StagedBlockCopier
from kvscope_engine.model.kv_cache.kv_storage import KVStorage

NUM_BLOCKS, NUM_HOST, NUM_DISK = 9, 7, 5
KINDS = ("write", "save", "save", "load", "load", "offload", "rise", "flush", "drain")
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1 << 30)), max_size=80)
RELAXED = settings(max_examples=examples(120))


def some(draw: random.Random, at_most: int) -> int:
    """Return mostly a small number, so that calls rarely touch the same blocks, and sometimes all."""
    return draw.choice((1, 1, 2, 3, at_most))


class RandomMoves:
    """A mover together with the expected contents of every slot; None means that a slot must not be read."""

    def __init__(self, storage: KVStorage, mover: BlockMover, disk: DiskTier, slab: HostSlab, tools: Any) -> None:
        self.storage, self.mover, self.disk, self.slab = storage, mover, disk, slab
        self.streams: Any | None = None
        self.content, self.overwrite = tools.content, tools.overwrite
        self.scratch = KVStorage(1, storage.block_size, storage.layers, storage.dtype, storage.device)
        self.pool: list[bytes] = [self.content(storage, block) for block in range(NUM_BLOCKS)]
        self.host: list[bytes | None] = [None] * NUM_HOST
        self.cold: list[bytes | None] = [None] * NUM_DISK

    def write(self, draw: random.Random) -> None:
        """Write blocks like a forward pass: after a flush, on the compute stream."""
        self.mover.flush()
        for block in draw.sample(range(NUM_BLOCKS), draw.randint(1, 3)):
            self._write(block, draw.getrandbits(30))

    def _write(self, block: int, seed: int) -> None:
        self.pool[block] = self.overwrite(self.scratch, 0, seed)
        if self.streams is None:
            self.overwrite(self.storage, block, seed)
        else:
            self.streams.run("compute", lambda: self._overwrite(block, seed))

    def _overwrite(self, block: int, seed: int) -> None:
        self.overwrite(self.storage, block, seed)

    def save(self, draw: random.Random) -> None:
        count = some(draw, NUM_HOST)
        slots = draw.sample(range(NUM_HOST), count)
        blocks = [draw.randrange(NUM_BLOCKS) for _ in range(count)]
        self.mover.save(blocks, slots)
        for block, slot in zip(blocks, slots, strict=True):
            self.host[slot] = self.pool[block]

    def load(self, draw: random.Random) -> None:
        known = [slot for slot, held in enumerate(self.host) if held is not None]
        if known:
            blocks = draw.sample(range(NUM_BLOCKS), some(draw, NUM_BLOCKS))
            slots = [draw.choice(known) for _ in blocks]
            self.mover.load(slots, blocks)
            for slot, block in zip(slots, blocks, strict=True):
                self.pool[block] = self.host[slot] or b""

    def offload(self, draw: random.Random) -> None:
        known = [slot for slot, held in enumerate(self.host) if held is not None]
        if known:
            targets = draw.sample(range(NUM_DISK), some(draw, NUM_DISK))
            slots = [draw.choice(known) for _ in targets]
            assert all(self.mover.offload(slots, targets, [None] * len(targets)))
            for slot, target in zip(slots, targets, strict=True):
                self.cold[target] = self.host[slot]

    def rise(self, draw: random.Random) -> None:
        count = some(draw, NUM_HOST)
        sources = [draw.randrange(NUM_DISK) for _ in range(count)]
        slots = draw.sample(range(NUM_HOST), count)
        came = self.mover.load_from_disk(sources, slots)
        assert came == [self.cold[source] is not None for source in sources]
        for source, slot in zip(sources, slots, strict=True):
            self.host[slot] = self.cold[source]

    def flush(self, draw: random.Random) -> None:
        self.mover.flush()

    def drain(self, draw: random.Random) -> None:
        assert self.disk.drain()

    def end(self) -> None:
        """Check that everything is where it must be."""
        self.mover.flush()
        if self.streams is not None:
            self.streams.finish("compute")
            self.streams.finish("copy")
        assert [self.content(self.storage, block) for block in range(NUM_BLOCKS)] == self.pool
        self._check_host()
        assert self.disk.drain()
        slots = [slot for slot, held in enumerate(self.cold) if held is not None]
        assert all(self.mover.load_from_disk(slots, range(len(slots))))
        self.host[: len(slots)] = [self.cold[slot] for slot in slots]
        self._check_host()

    def _check_host(self) -> None:
        rows = self.slab.rows.numpy()
        assert all(held is None or rows[slot].tobytes() == held for slot, held in enumerate(self.host))


@contextmanager
def journey(tools: Any, make: Callable[..., KVStorage], streams: Any | None) -> Iterator[RandomMoves]:
    storage = make(NUM_BLOCKS)
    words = BlockLayout(storage)
    slab = HostSlab(NUM_HOST, words.block_bytes)
    copies: BlockCopier = (
        HostBlockCopier(words, slab.rows) if streams is None else StagedBlockCopier(words, slab.rows, streams, 3)
    )
    disk = DiskTier(open_disk_file(None, NUM_DISK * 4096, keep=False), NUM_DISK, words.block_bytes)
    mover = BlockMover(copies, slab, disk, None, "")
    try:
        trip = RandomMoves(storage, mover, disk, slab, tools)
        trip.streams = streams
        yield trip
    finally:
        mover.close()


def travel(trip: RandomMoves, operations: list[tuple[str, int]]) -> None:
    for kind, seed in operations:
        draw = random.Random(seed)
        getattr(trip, kind)(draw)
        if trip.streams is not None:
            trip.streams.advance(draw.randint(0, 12))
    trip.end()


@RELAXED
@given(operations=OPERATIONS)
def test_direct_copies_preserve_block_contents_over_random_moves(
    operations: list[tuple[str, int]], tools: Any, random_blocks: Callable[..., KVStorage], own_cache: Path
) -> None:
    with journey(tools, random_blocks, None) as trip:
        travel(trip, operations)


@pytest.mark.parametrize("shortages", [0.0, 0.2])
@RELAXED
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 30))
def test_delayed_gpu_streams_preserve_block_contents_over_random_moves(
    operations: list[tuple[str, int]],
    seed: int,
    shortages: float,
    tools: Any,
    random_blocks: Callable[..., KVStorage],
    own_cache: Path,
    late_streams: Callable[..., Any],
) -> None:
    """Includes runs in which creating a mark sometimes fails for lack of memory."""
    draw = random.Random(seed)
    streams = late_streams(draw)
    mark = streams.mark

    def mark_if_there_is_memory(lane: Any) -> Any:
        if draw.random() < shortages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mark(lane)

    streams.mark = mark_if_there_is_memory
    with journey(tools, random_blocks, streams) as trip:
        travel(trip, operations)

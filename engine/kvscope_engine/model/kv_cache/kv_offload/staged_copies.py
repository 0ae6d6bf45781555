"""Copies between a device's pool and pinned host memory that overlap with the forward pass.

A save gathers blocks into a staging buffer on the compute lane, in order with the kernels that write them; one large
copy to the host follows on the copy lane. A load is copied to staging on the copy lane and scattered on the compute
lane. Two buffers alternate; each waits for the event of its last use. The host waits only before it accesses a slot
itself, and if the device lacks memory for a gather: blocks are then copied individually.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from kvscope_engine.model.device_memory.device_streams import StreamMark, Streams
from kvscope_engine.model.device_memory.out_of_memory import is_out_of_memory
from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout
from kvscope_engine.model.kv_cache.kv_offload.copy_speed import CopySpeed

NUM_STAGINGS = 2


@dataclass(slots=True)
class _Staging:
    rows: torch.Tensor
    """Staging buffer on the device, shape (blocks per chunk, words per slot)."""
    last_use: StreamMark | None = None


@dataclass(frozen=True, slots=True)
class _TimedCopy:
    speed: CopySpeed
    num_blocks: int
    started: StreamMark
    ended: StreamMark


@dataclass(slots=True)
class _Chunk:
    """Pairs of block and slot that fit into a staging buffer, ordered by slot."""

    blocks: list[int]
    slots: list[int]
    runs: list[tuple[int, int, int]] = field(init=False)
    """Runs of consecutive slots, one copy each: (first row of the staging buffer, first slot, number of slots)."""

    def __post_init__(self) -> None:
        breaks = [row for row, (a, b) in enumerate(pairwise(self.slots), start=1) if b != a + 1]
        self.runs = [(low, self.slots[low], high - low) for low, high in pairwise([0, *breaks, len(self.slots)])]


class StagedBlockCopier:
    """`BlockCopier` between a device's pool and `rows` of host memory, with at most `staging_blocks` blocks per
    copy."""

    def __init__(self, layout: BlockLayout, rows: torch.Tensor, streams: Streams, staging_blocks: int) -> None:
        self._parts = layout.parts
        self._device = layout.device
        self._host = layout.slots(rows)
        self._streams = streams
        shape = (staging_blocks, self._host.shape[1])
        self._stagings = [_Staging(self._host.new_empty(shape, device=layout.device)) for _ in range(NUM_STAGINGS)]
        self._pending = PendingCopies()
        self._in_progress: set[int] = set()
        self._timed_copies: deque[_TimedCopy] = deque()
        self.saving = CopySpeed()
        self.loading = CopySpeed()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if not self._pending.admits_saves(blocks, slots):
            self.flush()
        self._pending.add_saves(blocks, slots)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        if not self._pending.admits_loads(blocks):
            self.flush()
        self._pending.add_loads(slots, blocks)

    def await_copies(self, slots: Sequence[int]) -> None:
        if self._pending.touches(slots):
            self.flush()
        if not self._in_progress.isdisjoint(slots):
            self._streams.finish("copy")
            self._in_progress.clear()

    def flush(self) -> None:
        """Enqueue all pending copies on the device, in order. If this raises, copies not yet enqueued stay pending."""
        self._in_progress |= self._pending.slots
        self._enqueue(self._pending.saves, self._save, self._save_block)
        self._enqueue(self._pending.loads, self._load, self._load_block)
        self._pending = PendingCopies()
        self.measure()

    def measure(self) -> None:
        while self._timed_copies and self._timed_copies[0].ended.has_passed():
            copy = self._timed_copies.popleft()
            copy.speed.record_copy(copy.num_blocks, copy.ended.seconds_since(copy.started))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._streams.finish("copy")
            self._streams.finish("compute")
        self.measure()
        self._stagings.clear()
        self._parts = []
        self._host = self._host.new_empty(0, 0)

    def _enqueue(
        self,
        pairs: list[tuple[int, int]],
        enqueue: Callable[[_Chunk, _Staging], None],
        copy_block: Callable[[int, int], None],
    ) -> None:
        """Enqueue `pairs` (slot, block) ordered by slot, so that consecutive slots share one copy. Enqueued pairs are
        removed from the list.
        """
        pairs.sort()
        size = self._stagings[0].rows.shape[0]
        while pairs:
            slots, blocks = zip(*pairs[:size], strict=True)
            chunk = _Chunk(list(blocks), list(slots))
            try:
                enqueue(chunk, self._next_staging())
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._copy_one_by_one(chunk, copy_block)
            del pairs[:size]

    def _copy_one_by_one(self, chunk: _Chunk, copy_block: Callable[[int, int], None]) -> None:
        """Copy each block of the chunk separately, even if part of the chunk was enqueued before memory ran out.

        Needs no device memory and waits for both lanes.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._streams.finish("copy")
        for block, slot in zip(chunk.blocks, chunk.slots, strict=True):
            self._streams.run("compute", partial(copy_block, block, slot))
        self._streams.finish("compute")

    def _save_block(self, block: int, slot: int) -> None:
        for part in self._parts:
            self._host[slot, part.columns].copy_(part.blocks[block], non_blocking=True)

    def _load_block(self, block: int, slot: int) -> None:
        for part in self._parts:
            part.blocks[block].copy_(self._host[slot, part.columns], non_blocking=True)

    def _save(self, chunk: _Chunk, staging: _Staging) -> None:
        streams = self._streams
        if staging.last_use is not None:
            streams.wait("compute", staging.last_use)
        streams.run("compute", lambda: self._gather(chunk.blocks, staging.rows))
        streams.wait("copy", streams.mark("compute"))
        started = streams.mark("copy")
        streams.run("copy", lambda: self._to_host(chunk, staging.rows))
        staging.last_use = streams.mark("copy")
        self._timed_copies.append(_TimedCopy(self.saving, len(chunk.blocks), started, staging.last_use))

    def _load(self, chunk: _Chunk, staging: _Staging) -> None:
        streams = self._streams
        if staging.last_use is not None:
            streams.wait("copy", staging.last_use)
        started = streams.mark("copy")
        streams.run("copy", lambda: self._from_host(chunk, staging.rows))
        arrived = streams.mark("copy")
        streams.wait("compute", arrived)
        streams.run("compute", lambda: self._scatter(chunk.blocks, staging.rows))
        staging.last_use = streams.mark("compute")
        self._timed_copies.append(_TimedCopy(self.loading, len(chunk.blocks), started, arrived))

    def _gather(self, blocks: list[int], rows: torch.Tensor) -> None:
        ids = self._ids(blocks)
        for part in self._parts:
            rows[: len(blocks), part.columns] = part.blocks.index_select(0, ids)

    def _scatter(self, blocks: list[int], rows: torch.Tensor) -> None:
        ids = self._ids(blocks)
        for part in self._parts:
            part.blocks.index_copy_(0, ids, rows[: len(blocks), part.columns])

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        """Upload block ids through pinned memory. With pageable memory, the host would wait for the compute lane."""
        return torch.tensor(blocks, pin_memory=self._device.type == "cuda").to(self._device, non_blocking=True)

    def _to_host(self, chunk: _Chunk, rows: torch.Tensor) -> None:
        for row, slot, count in chunk.runs:
            self._host[slot : slot + count].copy_(rows[row : row + count], non_blocking=True)

    def _from_host(self, chunk: _Chunk, rows: torch.Tensor) -> None:
        for row, slot, count in chunk.runs:
            rows[row : row + count].copy_(self._host[slot : slot + count], non_blocking=True)

    def _next_staging(self) -> _Staging:
        self._stagings.reverse()
        return self._stagings[0]


class PendingCopies:
    """Saves and loads that were requested and not started, collected so that many share one large copy.

    Saves run before loads. A request that contradicts this order, or a second copy to the same target, requires a flush
    first. Pairs are (slot, block); no two saves have the same slot, no two loads the same block.
    """

    def __init__(self) -> None:
        self.saves: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self._saved_slots: set[int] = set()
        self._loaded_slots: set[int] = set()
        self._loaded_blocks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)

    def admits_saves(self, blocks: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether these saves may run together with the pending saves, before the pending loads."""
        return not (self.touches(slots) or not self._loaded_blocks.isdisjoint(blocks))

    def admits_loads(self, blocks: Sequence[int]) -> bool:
        return self._loaded_blocks.isdisjoint(blocks)

    def touches(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots is the source or target of a pending copy."""
        return not (self._saved_slots.isdisjoint(slots) and self._loaded_slots.isdisjoint(slots))

    def add_saves(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Add saves, which `admits_saves` must have accepted."""
        self.saves += zip(slots, blocks, strict=True)
        self._saved_slots.update(slots)

    def add_loads(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Add loads, which `admits_loads` must have accepted."""
        self.loads += zip(slots, blocks, strict=True)
        self._loaded_slots.update(slots)
        self._loaded_blocks.update(blocks)

    @property
    def slots(self) -> set[int]:
        return self._saved_slots | self._loaded_slots

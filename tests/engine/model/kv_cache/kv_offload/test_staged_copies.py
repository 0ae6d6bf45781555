"""Copies over staging buffers: bounded, batched, and without needless waits. `test_block_mover_storms` checks the
bytes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout
from kvscope_engine.model.kv_cache.kv_offload.staged_copies import StagedBlockCopier
from kvscope_engine.model.kv_cache.kv_storage import KVStorage

STAGING_BLOCKS = 4


class CountingCopies(StagedBlockCopier):
    """Records each copy to and from the host as (first staging row, first slot, number of slots)."""

    copied: list[tuple[int, int, int]]
    rows: torch.Tensor
    """Rows of the host slab."""

    def _to_host(self, chunk: Any, rows: torch.Tensor) -> None:
        self.copied += chunk.runs
        super()._to_host(chunk, rows)


@pytest.fixture
def streams(late_streams: Callable[..., Any]) -> Any:
    return late_streams(random.Random(0))


@pytest.fixture
def copies(storage: KVStorage, streams: Any) -> CountingCopies:
    words = BlockLayout(storage)
    rows = torch.zeros(16, words.block_bytes, dtype=torch.uint8)
    copies = CountingCopies(words, rows, streams, STAGING_BLOCKS)
    copies.copied, copies.rows = [], rows
    return copies


def finish(streams: Any) -> None:
    streams.finish("compute")
    streams.finish("copy")


def test_many_small_saves_are_batched_into_few_copies(copies: CountingCopies, streams: Any) -> None:
    for number in range(8):
        copies.save([number], [7 - number])
    assert not any(streams.lanes.values()), "copies must not start before the flush"
    copies.flush()
    finish(streams)
    assert copies.copied == [(0, 0, 4), (0, 4, 4)]
    assert copies.saving.num_blocks == 0, "durations must be measured later"
    copies.measure()
    assert copies.saving.num_blocks == 8


def test_gaps_between_slots_split_a_copy(copies: CountingCopies, streams: Any) -> None:
    copies.save([3, 4, 5], [9, 2, 3])
    copies.flush()
    finish(streams)
    assert copies.copied == [(0, 2, 2), (2, 9, 1)]


def test_settle_waits_only_for_started_copies_of_its_slots(copies: CountingCopies, streams: Any) -> None:
    copies.save([0, 1], [0, 1])
    copies.await_copies([5])
    assert not streams.lanes["copy"], "another slot started the copies"
    copies.flush()
    copies.await_copies([5])
    assert streams.lanes["copy"], "the copies of another slot were waited for"
    copies.await_copies([1])
    assert not streams.lanes["copy"]
    assert copies.copied == [(0, 0, 2)]


def test_flushing_staged_block_copies_does_not_wait_for_the_gpu(copies: CountingCopies, streams: Any) -> None:
    copies.save([0], [0])
    copies.flush()
    copies.load([0], [1])
    copies.flush()
    copies.measure()
    assert copies.copied == []
    assert copies.saving.seconds_per_block == 0


def test_close_finishes_all_copies(copies: CountingCopies, streams: Any) -> None:
    copies.save([0], [0])
    copies.close()
    assert copies.copied == [(0, 0, 1)]
    assert not any(streams.lanes.values())


def test_load_waits_for_its_staging_buffer(
    copies: CountingCopies, streams: Any, storage: KVStorage, tools: Any
) -> None:
    """Three chunks with two buffers, and a link that is faster than the device."""
    before = [tools.content(storage, block) for block in range(12)]
    copies.save(range(12), range(12))
    copies.flush()
    finish(streams)
    copies.load(range(12), range(11, -1, -1))
    copies.flush()
    streams.finish("copy")
    streams.finish("compute")
    assert [tools.content(storage, block) for block in range(12)] == before[::-1]


# With no device memory left


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def there_and_back(copies: StagedBlockCopier, storage: KVStorage, tools: Any, streams: Any) -> None:
    """Save and load all blocks in three chunks each way, while the next step overwrites them."""
    before = [tools.content(storage, block) for block in range(12)]
    copies.save(range(12), range(11, -1, -1))
    copies.flush()
    finish(streams)
    for block in range(12):
        tools.overwrite(storage, block, block)
    copies.load(range(12), range(12))
    copies.flush()
    finish(streams)
    assert [tools.content(storage, block) for block in range(12)] == before[::-1]


@pytest.mark.parametrize("operation", ["index_select", "index_copy_"])
def test_blocks_are_copied_if_gather_or_scatter_fails(
    storage: KVStorage, prompt_streams: Callable[..., Any], tools: Any, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def fails(*given: Any) -> None:
        raise NO_MEMORY

    words, streams = BlockLayout(storage), prompt_streams()
    rows = torch.zeros(16, words.block_bytes, dtype=torch.uint8)
    copies = StagedBlockCopier(words, rows, streams, STAGING_BLOCKS)
    monkeypatch.setattr(torch.Tensor, operation, fails)
    there_and_back(copies, storage, tools, streams)


def test_blocks_are_copied_correctly_whichever_cuda_event_cannot_be_created(
    storage: KVStorage, late_streams: Callable[..., Any], tools: Any
) -> None:
    words = BlockLayout(storage)
    for failing in itertools.count(1):
        streams, calls = late_streams(random.Random(failing)), itertools.count(1)
        mark = streams.mark

        def failing_mark(lane: Any, *, mark: Any = mark, calls: Any = calls, failing: int = failing) -> Any:
            if next(calls) == failing:
                raise NO_MEMORY
            return mark(lane)

        streams.mark = failing_mark
        rows = torch.zeros(16, words.block_bytes, dtype=torch.uint8)
        there_and_back(StagedBlockCopier(words, rows, streams, STAGING_BLOCKS), storage, tools, streams)
        if next(calls) <= failing:
            break
    assert failing == 6 * 3 + 1, "three marks per chunk and six chunks"


def test_awaited_block_copies_are_complete_even_if_no_cuda_event_can_be_created(
    copies: CountingCopies, streams: Any, tools: Any, storage: KVStorage
) -> None:
    """A saved slot is read immediately, and a loaded one is overwritten."""

    def no_memory(lane: Any) -> Any:
        raise NO_MEMORY

    streams.mark = no_memory
    before = tools.content(storage, 0)
    copies.save([0], [5])
    copies.await_copies([5])
    assert copies.rows[5].numpy().tobytes() == before
    copies.load([5], [1])
    copies.await_copies([5])
    copies.rows[5] = 0
    finish(streams)
    assert tools.content(storage, 1) == before


def test_copies_that_failed_to_start_stay_pending(
    storage: KVStorage, prompt_streams: Callable[..., Any], tools: Any
) -> None:
    """There are two chunks; the first was saved and must not be saved again from blocks that changed since."""
    words = BlockLayout(storage)
    rows = torch.zeros(16, words.block_bytes, dtype=torch.uint8)
    errors = [None] * 3 + [RuntimeError("an illegal instruction was encountered")]

    def before_mark() -> None:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error

    copies = StagedBlockCopier(words, rows, prompt_streams(before_mark), STAGING_BLOCKS)
    before = [tools.content(storage, block) for block in range(8)]
    copies.save(range(8), range(8))
    with pytest.raises(RuntimeError, match="illegal instruction"):
        copies.flush()
    for block in range(4):
        tools.overwrite(storage, block, block)
    copies.flush()
    assert [row.numpy().tobytes() for row in rows[:8]] == before

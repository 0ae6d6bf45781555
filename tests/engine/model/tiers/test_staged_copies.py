"""Copies over staging buffers: bounded, batched, and never waited for without need. Bytes: `test_journeys`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.tiers.block_layout import BlockLayout
from kvscope_engine.model.tiers.staged_copies import StagedCopies

STAGING_BLOCKS = 4


class CountingCopies(StagedCopies):
    """Notes each copy to and from the host: (first row of staging, first place, places)."""

    copied: list[tuple[int, int, int]]

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
    copies.copied = []
    return copies


def finish(streams: Any) -> None:
    streams.finish("compute")
    streams.finish("copy")


def test_many_small_saves_go_in_few_large_copies(copies: CountingCopies, streams: Any) -> None:
    for number in range(8):
        copies.save([number], [7 - number])
    assert not any(streams.lanes.values()), "nothing starts before it must"
    copies.flush()
    finish(streams)
    assert copies.copied == [(0, 0, 4), (0, 4, 4)]
    assert copies.saving.num_blocks == 0, "how long it took is taken in later"
    copies.measure()
    assert copies.saving.num_blocks == 8


def test_gaps_between_places_part_a_copy(copies: CountingCopies, streams: Any) -> None:
    copies.save([3, 4, 5], [9, 2, 3])
    copies.flush()
    finish(streams)
    assert copies.copied == [(0, 2, 2), (2, 9, 1)]


def test_only_what_is_under_way_is_waited_for(copies: CountingCopies, streams: Any) -> None:
    copies.save([0, 1], [0, 1])
    copies.settle([5])
    assert not streams.lanes["copy"], "another's place made them start"
    copies.flush()
    copies.settle([5])
    assert streams.lanes["copy"], "another's place was waited for"
    copies.settle([1])
    assert not streams.lanes["copy"]
    assert copies.copied == [(0, 0, 2)]


def test_flush_waits_for_nothing(copies: CountingCopies, streams: Any) -> None:
    copies.save([0], [0])
    copies.flush()
    copies.load([0], [1])
    copies.flush()
    copies.measure()
    assert copies.copied == []
    assert copies.saving.seconds_per_block == 0


def test_closing_ends_everything(copies: CountingCopies, streams: Any) -> None:
    copies.save([0], [0])
    copies.close()
    assert copies.copied == [(0, 0, 1)]
    assert not any(streams.lanes.values())


def test_a_load_waits_for_the_staging_buffer_that_it_goes_through(
    copies: CountingCopies, streams: Any, storage: KVStorage, tools: Any
) -> None:
    """Three chunks, two buffers, and a link that is faster than the device."""
    before = [tools.content(storage, block) for block in range(12)]
    copies.save(range(12), range(12))
    copies.flush()
    finish(streams)
    copies.load(range(12), range(11, -1, -1))
    copies.flush()
    streams.finish("copy")
    streams.finish("compute")
    assert [tools.content(storage, block) for block in range(12)] == before[::-1]

"""A second pool of vLLM below the first is found, and its rows are published."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of

from kvscope_inside import CacheState
from kvscope_inside.cached_texts import CachedText, CachedTexts
from kvscope_inside.vllm.block_texts import hash_of_row
from kvscope_inside.vllm.offloading import unpublished_connectors
from kvscope_inside.vllm.second_pool import SecondPoolRows, second_pool_of
from kvscope_telemetry.ledger import NO_OWNER, BlockState

NUM_BLOCKS, NUM_HOST = 8, 4
ONE, OTHER = (bytes([value] * 12) + bytes(4) for value in (1, 2))


def connector_of(medium: str = "CPU", num_blocks: int = NUM_HOST) -> Any:
    pool = SimpleNamespace(blocks=[None] * num_blocks, free_blocks=lambda blocks: None)
    return SimpleNamespace(scheduler_manager=SimpleNamespace(cpu_block_pool=pool, kv_event_medium=medium))


@pytest.mark.parametrize(("medium", "is_on_disk"), [("CPU", False), ("STORAGE", True)])
def test_second_pool_is_found_with_its_medium(medium: str, is_on_disk: bool) -> None:
    connector = connector_of(medium)
    found = second_pool_of([SimpleNamespace(), connector])
    assert found is not None
    assert (found.num_blocks, found.is_on_disk) == (NUM_HOST, is_on_disk)
    assert unpublished_connectors(SimpleNamespace(connector=connector)) == ""
    assert second_pool_of([SimpleNamespace(scheduler_manager=None), connector_of(num_blocks=0)]) is None


@pytest.fixture
def state() -> CacheState:
    hello = hello_of(NUM_BLOCKS, num_reserved=1)
    return CacheState(replace(hello, cache=replace(hello.cache, num_host_blocks=NUM_HOST)))


def test_block_of_the_second_pool_is_written_found_read_and_evicted(state: CacheState) -> None:
    ledger, row = state.ledger, NUM_BLOCKS + 2
    text = CachedText(number=3, start=4, token_ids=array("i", [5, 6, 7, 8]))
    texts = CachedTexts()
    texts.set(5, text)
    state.set_blocks([5], hash=hash_of_row(ONE), parent=77, owner=3, filled=4, state=BlockState.CACHED)
    rows = SecondPoolRows(state, texts, 100)

    def stands() -> tuple[int, int, int, int, int]:
        columns = (ledger.state, ledger.ref_count, ledger.filled, ledger.owner, ledger.prefix_hits)
        return tuple(int(column[row]) for column in columns)  # type: ignore[return-value]

    assert rows.update(1, [2], [1], [None]) == []
    assert stands() == (BlockState.ACTIVE, 1, 0, NO_OWNER, 0)
    assert rows.update(2, [2, 2], [1, 0], [None, ONE]) == []
    assert stands() == (BlockState.CACHED, 0, 4, 3, 0)
    assert (int(ledger.parent[row]), texts.get(row)) == (77, text)
    rows.update(3, [2], [1], [ONE])
    assert stands() == (BlockState.ACTIVE, 1, 4, 3, 1)
    assert rows.update(4, [2], [1], [OTHER]) == [hash_of_row(ONE)]
    assert stands() == (BlockState.ACTIVE, 1, 4, NO_OWNER, 0), "of what the first pool does not have any more"
    assert row not in texts
    assert rows.update(5, [0, 2], [1, 0], [None, None]) == [hash_of_row(OTHER)]
    assert stands() == (BlockState.FREE, 0, 0, NO_OWNER, 0)
    assert ledger.state[NUM_BLOCKS] == BlockState.UNMAPPED, "the null block of the second pool is not unmapped"
    frame = state.frame(6, 6)
    assert frame.counters.offloaded_blocks == 2

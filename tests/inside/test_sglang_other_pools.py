"""Pages of windows and recurrent states are published as their pools have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.inside.fake_sglang import Request, Scheduler

from kvscope_inside import CacheState
from kvscope_inside.sglang.eviction_beneficiary import EvictedCounts
from kvscope_inside.sglang.other_pools import Holder, StateRows, WindowRows, hashes_of_windows
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_facts import hello_of, kv_bytes
from kvscope_inside.sglang.sglang_memory import SchedulerMemory
from kvscope_inside.sglang.sglang_recorder import SglangRecord
from kvscope_inside.sglang.sglang_translator import SglangTranslator
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.metrics.pool_figures import pool_figures
from kvscope_telemetry.mirror.mirror import Mirror

NUM_PAGES, NUM_WINDOWS, NUM_STATES = 8, 5, 3


def hybrid_scheduler(monkeypatch: Any) -> Any:
    """Return a scheduler with three pools: rows 1 to 8 are pages, 9 to 13 pages of windows, and 14 to 16, the last,
    states.
    """
    monkeypatch.setattr("kvscope_inside.sglang.sglang_facts._version", lambda: "0.0")
    scheduler = Scheduler(num_pages=NUM_PAGES)
    own = Scheduler(num_pages=NUM_WINDOWS).token_to_kv_pool_allocator
    allocator = SimpleNamespace(
        full_attn_allocator=scheduler.token_to_kv_pool_allocator, swa_attn_allocator=own, full_to_swa_index_mapping=[]
    )
    scheduler.token_to_kv_pool_allocator = allocator  # type: ignore[assignment]
    scheduler.tree_cache.swa_retain_window = 6  # type: ignore[attr-defined]
    table: Any = scheduler.req_to_token_pool
    table.mamba_allocator = SimpleNamespace(free_slots=[], size=NUM_STATES)
    table.req_index_to_mamba_index_mapping = []
    table.mamba_map = {0: 0, 2: 1}
    table.mamba_pool = SimpleNamespace(get_kv_size_bytes=lambda: 300)
    return scheduler


def test_each_sglang_pool_is_published_as_a_kv_group_with_separate_blocks(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    pools, hello = pools_of(scheduler), hello_of(scheduler, 7)
    cache = hello.cache
    assert cache.num_blocks == 1 + NUM_PAGES + NUM_WINDOWS == pools.num_blocks
    assert (cache.num_states, cache.first_state, cache.num_rows) == (NUM_STATES, 14, 17)
    assert cache.block_bytes == 64, "of a page"
    assert cache.smallest_hit == 4, "a state may be kept after any page"
    assert [(group.kind, group.block_size, group.window, group.block_bytes) for group in cache.groups] == [
        ("full", 4, 0, 64),
        ("window", 4, 6, 64),
        ("state", 256, 0, 100),
    ]
    assert [group.num_blocks for group in cache.groups] == [NUM_PAGES, NUM_WINDOWS, NUM_STATES]
    assert cache.pool_tokens == NUM_PAGES * 4
    assert hello.capabilities.groups
    assert kv_bytes(pools) == 64 * (NUM_PAGES + NUM_WINDOWS) + 300
    state = CacheState(hello)
    WindowRows(state, pools)
    StateRows(state, pools)
    assert state.ledger.group.tolist() == [0] * 9 + [1] * NUM_WINDOWS + [2] * NUM_STATES
    assert state.ledger.tier.tolist() == [Tier.HBM] * 14 + [Tier.STATES] * NUM_STATES


def test_rows_of_states_follow_the_pages_in_host_memory(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    cache: Any = scheduler.tree_cache
    host = SimpleNamespace(page_size=4, size=24, free=lambda *_: None)
    anchor = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=host))
    cache.cache_controller = SimpleNamespace(mem_pool_host=anchor, write=lambda: None, load=lambda: None)
    hello = hello_of(scheduler, 7)
    state = CacheState(hello)
    StateRows(state, pools_of(scheduler))
    assert (hello.cache.num_host_blocks, hello.cache.first_state) == (6, 20)
    assert state.ledger.tier.tolist() == [Tier.HBM] * 14 + [Tier.HOST] * 6 + [Tier.STATES] * NUM_STATES
    assert state.ledger.group[20:].tolist() == [2] * NUM_STATES


def test_sglang_pool_figures_count_pages_and_recurrent_states_separately(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    state = CacheState(hello_of(scheduler, 7))
    rows, mirror = StateRows(state, pools_of(scheduler)), Mirror()
    known = state.add_request("a", num_prompt_tokens=9)
    known.state = RequestState.RUNNING
    state.set_blocks([1, 2], state=BlockState.ACTIVE, ref_count=1, owner=known.number)
    free: npt.NDArray[np.bool_] = np.zeros(NUM_STATES + 1, bool)
    rows.read(1, free, [np.array([[0], [2]])], [(Holder(known, np.empty(0, np.int64), 0, 9), 1)])
    state.frame(1, 1)
    mirror.reset(state.snapshot())
    figures = pool_figures(mirror)
    pool, states = figures.tiers
    assert (pool.num_blocks, pool.num_used, pool.num_cached, pool.num_free) == (14, 2, 0, 11)
    assert (states.tier, states.num_used, states.num_cached, states.num_free) == ("states", 1, 2, 0)
    assert figures.groups == ((2, 0), (0, 0), (1, 2))


def test_latents_are_published_with_the_size_of_their_keys_and_values(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvscope_inside.sglang.sglang_facts._version", lambda: "0.0")
    scheduler: Any = Scheduler(num_pages=NUM_PAGES)
    pool = type("MLATokenToKVPool", (), {"get_kv_size_bytes": lambda self: 36 * NUM_PAGES, "layer_num": 2})()
    scheduler.token_to_kv_pool_allocator.get_kvcache = lambda: pool
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 1, "qk_nope_head_dim": 2, "v_head_dim": 4}
    scheduler.model_config.hf_text_config = SimpleNamespace(num_attention_heads=6, **sizes)
    hello = hello_of(scheduler, 7)
    (group,) = hello.cache.groups
    assert (group.kind, group.block_bytes, group.expanded_bytes) == ("latent", 36, 36 * 2 * 6 * 4 // 9)
    assert not hello.capabilities.groups, "there is more than one group"
    del scheduler.model_config.hf_text_config.v_head_dim
    assert hello_of(scheduler, 7).cache.groups[0].expanded_bytes == 0, "the expanded size is known"


def test_window_page_is_held_while_its_request_looks_back_to_it(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    state = CacheState(hello_of(scheduler, 7))
    rows, ledger = WindowRows(state, pools_of(scheduler)), state.ledger
    known = state.add_request("a", num_prompt_tokens=15)
    known.state = RequestState.RUNNING
    pages = np.array([3, 1, 2, 5])
    state.set_blocks(pages, state=BlockState.ACTIVE, owner=known.number, filled=[4, 4, 4, 3], hash=[11, 12, 0, 0])

    def read(num_tokens: int, of_pages: list[int]) -> tuple[list[int], list[int]]:
        mapping: npt.NDArray[np.int64] = np.zeros(NUM_PAGES + 1, np.int64)
        mapping[pages] = of_pages
        lost = rows.read(1, mapping, [Holder(known, pages, 2, num_tokens)])
        state.frame(1, 1)
        return lost.rows.tolist(), lost.hashes.tolist()

    assert read(11, [4, 5, 1, 0]) == ([], [])
    assert known.tables[1] == [0, 13, 9, 0], "its window begins in the second page"
    assert ledger.state[9:14].tolist() == [1, 0, 0, 2, 1]
    assert ledger.ref_count[9:14].tolist() == [1, 0, 0, 0, 1]
    assert ledger.owner[[9, 12, 13]].tolist() == [known.number] * 3
    assert ledger.hash[[12, 13]].tolist() == hashes_of_windows(np.array([11, 12], np.uint64)).tolist()
    assert ledger.filled[[9, 12, 13]].tolist() == [4, 4, 4]
    assert rows.page_of(13) == 1
    assert read(15, [4, 5, 1, 3])[0] == []
    assert known.tables[1] == [0, 0, 9, 11]
    assert ledger.state[13] == BlockState.CACHED
    assert read(15, [0, 5, 1, 3])[0] == [12], "the tree keeps the page of full attention alone"
    assert ledger.state[12] == BlockState.FREE
    assert ledger.group[12] == 1
    rows.reset()
    known.set_table((), 1)
    assert read(15, [0, 0, 1, 3])[0] == []
    assert known.tables[1] == [0, 0, 9, 11]


def test_sglang_recurrent_state_is_published_as_held_cached_or_free(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    state = CacheState(hello_of(scheduler, 7))
    rows, ledger = StateRows(state, pools_of(scheduler)), state.ledger
    known = state.add_request("a", num_prompt_tokens=9)
    known.state = RequestState.RUNNING
    holder = Holder(known, np.empty(0, np.int64), 0, 9)

    def read(free: list[int], of_row: list[int], holders: list[tuple[Holder, int]]) -> list[int]:
        mask: npt.NDArray[np.bool_] = np.zeros(NUM_STATES + 1, bool)
        mask[free] = True
        columns = [np.array([[0], of_row[:1]]), np.array([[0], of_row[1:]])]
        return rows.read(1, mask, columns, holders).tolist()

    assert read([3], [2, 1], [(holder, 1)]) == []
    assert known.tables[2] == [15, 14], "the one that it writes, and the one that is kept for the tree"
    assert ledger.state[14:17].tolist() == [1, 1, 0]
    assert ledger.filled[14:17].tolist() == [0, 9, 0]
    assert read([2, 3], [2, 1], []) == []
    assert ledger.state[14:17].tolist() == [BlockState.CACHED, 0, 0]
    assert ledger.owner[14:17].tolist() == [known.number, NO_OWNER, NO_OWNER]
    assert read([1, 2, 3], [2, 1], []) == [14]
    assert ledger.group[14:17].tolist() == [2, 2, 2]


def test_events_count_states_beside_blocks(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    state = CacheState(hello_of(scheduler, 7))
    translator = SglangTranslator(state, pools=pools_of(scheduler))

    def cause_of(*happened: tuple[Any, ...]) -> tuple[str, int]:
        (event,) = translator.apply(SglangRecord(1, list(happened), None, [], [], [], [], None, None)).events
        return event.cause, event.num_blocks

    request = Request("a", range(12))
    said, _ = cause_of(("added", request, 1, 0, 32), ("scheduled", request, 8))
    assert "8 of 12 tokens were there already, 2 blocks in the pool and the recurrent state after them" in said

    said, num_blocks = cause_of(("evicted", EvictedCounts(8, 0, 1, None)))
    assert "2 cached blocks and 1 cached state were evicted" in said
    assert num_blocks == state.totals["evicted_blocks"] == 2
    said, num_blocks = cause_of(("evicted", EvictedCounts(0, 0, 1, None)))
    assert "1 cached state was evicted" in said
    assert (num_blocks, state.totals["evicted_blocks"]) == (0, 2)
    state.set_blocks([3, state.hello.cache.first_state], state=BlockState.CACHED)
    assert cause_of(("flushed",)) == ("the prefix cache was emptied: 1 cached block and 1 cached state", 1)
    assert not state.ledger.state[1:].any()
    assert state.ledger.group[14:].tolist() == [2] * NUM_STATES


def test_sglang_memory_is_published_by_weights_graphs_and_kv_cache(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    scheduler.tp_worker.model_runner.graph_memory_usage = {"decode": 0.5, "prefill": 0.25}
    memory = SchedulerMemory(scheduler, hello_of(scheduler, 7)).breakdown()
    assert memory is not None
    assert memory.weights_bytes == 1000, "tied weights are there once"
    assert [(part.name, part.num_bytes) for part in memory.modules] == [("embeddings", 1000)]
    assert memory.graphs_bytes == 3 << 28
    assert memory.kv_bytes == 64 * (NUM_PAGES + NUM_WINDOWS) + 300
    assert memory.reserved_bytes == -1, "the reserved memory of a CPU is known"


def test_unreadable_memory_is_unknown(monkeypatch: Any) -> None:
    scheduler = hybrid_scheduler(monkeypatch)
    del scheduler.tp_worker
    assert SchedulerMemory(scheduler, hello_of(scheduler, 7)).breakdown() is None

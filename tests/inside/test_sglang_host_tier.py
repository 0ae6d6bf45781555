"""Pages that HiCache writes to host memory, loads and drops are published."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.inside.fake_sglang import Request, Scheduler, Tensor, tensor

from kvscope_inside import CacheState
from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang import sglang_recorder
from kvscope_inside.sglang.pages import reader_of
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_facts import hello_of
from kvscope_inside.sglang.sglang_recorder import SglangRecorder
from kvscope_inside.sglang.sglang_translator import SglangTranslator
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.telemetry import Frame

NUM_PAGES, NUM_HOST = 20, 6


class FakeController:
    """A cache controller that allocates host pages from the first on."""

    def __init__(self) -> None:
        self.pool = SimpleNamespace(page_size=4, size=NUM_HOST * 4, free=lambda slots: len(slots))
        self.mem_pool_host = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=self.pool))
        self.next = 0

    def write(self, device_indices: Tensor, *, node_id: int) -> Tensor:
        first, self.next = self.next, self.next + len(device_indices)
        return tensor(np.arange(first, self.next))

    def load(self, host_indices: Tensor, *, node_id: int) -> Tensor:
        return slots_of(range(15, 15 + len(host_indices) // 4))


def slots_of(pages: Any) -> Tensor:
    return tensor([page * 4 + slot for page in pages for slot in range(4)])


class PublishedScheduler:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvscope_inside.sglang.sglang_facts._version", lambda: "0.0")
        monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", 1_000_000_000)
        self.failures: list[str] = []
        self.scheduler, self.controller = Scheduler(num_pages=NUM_PAGES), FakeController()
        self.cache: Any = self.scheduler.tree_cache
        self.cache.cache_controller, self.cache.ongoing_load_back = self.controller, {}
        self.cache._finish_write_through_ack = lambda node: None
        self.cache.loading_check = self.cache.ongoing_load_back.clear
        pools = pools_of(self.scheduler)
        self.state = CacheState(hello_of(self.scheduler, 7))
        hooks = Hooks(lambda name, error: self.failures.append(f"{name}: {error!r}"))
        reader = reader_of(self.scheduler.req_to_token_pool.req_to_token, pools)
        self.recorder, self.translator = (
            SglangRecorder(self.scheduler, hooks, reader, lambda: None),
            SglangTranslator(self.state, pools=pools),
        )
        self.scheduler.add(Request("first", list(range(12)), 1))
        self.step()
        self.step()
        self.pages = [node.page for node in self.cache.nodes.values()]

    def step(self) -> Frame:
        self.scheduler.step()
        while self.recorder.records:
            self.frame = self.translator.apply(self.recorder.records.popleft())
        assert self.failures == []
        return self.frame

    @property
    def host_rows(self) -> Any:
        """Return state, reference count and hash of each page in host memory."""
        ledger, rows = self.state.ledger, slice(NUM_PAGES + 1, None)
        return ledger.state[rows].tolist(), ledger.ref_count[rows].tolist(), ledger.hash[rows].tolist()


def test_sglang_host_memory_pages_are_published_when_written_cached_loaded_and_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = PublishedScheduler(monkeypatch)
    ledger, pages = told.state.ledger, told.pages
    assert ledger.num_blocks == NUM_PAGES + 1 + NUM_HOST
    assert (ledger.tier[NUM_PAGES + 1 :] == Tier.HOST).all()
    told.controller.write(slots_of(pages[:2]), node_id=5)
    told.step()
    assert told.host_rows[0][:3] == [BlockState.ACTIVE, BlockState.ACTIVE, BlockState.FREE]
    assert told.host_rows[2][:2] == [0, 0], "they can be found when they are written"
    told.cache._finish_write_through_ack(5)
    frame = told.step()
    assert told.host_rows[0][:2] == [BlockState.CACHED] * 2
    assert told.host_rows[2][:2] == ledger.hash[pages[:2]].tolist()
    assert ledger.parent[[21, 22]].tolist() == ledger.parent[pages[:2]].tolist()
    assert np.frombuffer(frame.moves.saved, "<u4").tolist() == [21, 22]
    assert told.translator.contents([22])[0].token_ids == (4, 5, 6, 7)
    told.cache.ongoing_load_back[5] = None
    told.controller.load(host_indices=tensor(np.arange(4, 8)), node_id=5)
    frame = told.step()
    assert told.host_rows[0][:2] == [BlockState.CACHED, BlockState.ACTIVE]
    assert np.frombuffer(frame.moves.loaded, "<u4").tolist() == [15]
    told.cache.loading_check()
    told.step()
    assert told.host_rows[:2] == ([2, 2, 0, 0, 0, 0], [0] * NUM_HOST)
    assert ledger.prefix_hits[[21, 22]].tolist() == [0, 1]
    told.controller.pool.free(tensor(np.arange(0, 4)))
    frame = told.step()
    assert told.host_rows[0][:2] == [BlockState.FREE, BlockState.CACHED]
    assert np.frombuffer(frame.moves.evicted, "<u4").tolist() == [21]
    assert told.state.totals["offloaded_blocks"] == 2
    assert told.state.totals["loaded_blocks"] == 1


def test_page_written_and_dropped_between_two_copies_has_its_old_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that SGLang writes back are given to other requests at once."""
    told = PublishedScheduler(monkeypatch)
    had = told.state.ledger.hash[told.pages].tolist()
    told.cache.is_write_back = True
    told.controller.write(slots_of(told.pages), node_id=5)
    told.cache._finish_write_through_ack(5)
    told.cache.evict(12)
    told.scheduler.add(Request("other", [50 + each for each in range(4 * NUM_PAGES - 20)], 1))
    told.step()
    told.step()
    assert told.host_rows[2][:3] == had


def test_page_written_at_once_has_its_current_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two copies of the state a page was evicted, given to another text, and written."""
    told = PublishedScheduler(monkeypatch)
    had = told.state.ledger.hash[told.pages].tolist()
    told.cache.evict(12)
    request = told.scheduler.add(Request("other", [50 + each for each in range(4 * NUM_PAGES - 2)], 1))
    monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", 1)
    while request.finished_reason is None:
        told.scheduler.step()
    told.controller.write(slots_of(told.pages[1:]), node_id=5)
    told.cache._finish_write_through_ack(5)
    told.step()
    table = [node.page for node in told.cache.nodes.values()]
    assert set(told.pages[1:]) <= set(table)
    assert told.host_rows[2][:2] == told.state.ledger.hash[told.pages[1:]].tolist()
    assert not set(told.host_rows[2][:2]) & {0, *had}


def test_text_that_ended_and_was_evicted_between_two_copies_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    told = PublishedScheduler(monkeypatch)
    monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", 1)
    request = told.scheduler.add(Request("short", [90 + each for each in range(8)], 1))
    while request.finished_reason is None:
        if request.kv.req_pool_idx is not None:
            told.pages = told.scheduler.table_of(request)
        told.scheduler.step()
        if request.finished_reason is not None:
            break
    nodes = {node.key: node.page for node in told.cache.nodes.values()}
    pages = [nodes[tuple(range(90, 90 + end))] for end in (4, 8)]
    told.controller.write(slots_of(pages), node_id=5)
    told.cache._finish_write_through_ack(5)
    told.cache.evict(40)
    other = told.scheduler.add(Request("other", [50 + each for each in range(4 * NUM_PAGES - 2)], 9))
    for _ in range(7):
        told.scheduler.step()
    assert other.finished_reason is None
    monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", 1_000_000_000)
    told.step()
    hashes = told.host_rows[2][:2]
    assert 0 not in hashes
    assert len(set(hashes)) == 2
    assert told.translator.contents([NUM_PAGES + 2])[0].token_ids == (94, 95, 96, 97)


def test_sglang_cache_flush_empties_the_published_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told = PublishedScheduler(monkeypatch)
    told.controller.write(slots_of(told.pages), node_id=5)
    told.step()
    told.controller.write(slots_of(told.pages), node_id=6)
    assert told.scheduler.flush_cache()
    told.step()
    assert (told.state.ledger.state[1:] == BlockState.FREE).all()
    told.scheduler.add(Request("again", list(range(12)), 1))
    told.step()
    table = told.scheduler.table_of(told.scheduler.running[0]) if told.scheduler.running else []
    assert all(told.state.ledger.state[page] == BlockState.ACTIVE for page in table)


def test_sglang_host_memory_used_only_as_a_buffer_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    told = PublishedScheduler(monkeypatch)
    told.cache.host_memory_mode = "buffer_only"
    assert pools_of(told.scheduler).num_host_pages == 0

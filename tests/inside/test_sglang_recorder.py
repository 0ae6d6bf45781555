"""Notes of SGLang's scheduler become rows, tables, figures and events that equal its objects."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.inside.fake_sglang import Batch, Request, Scheduler

from kvscope_inside import CacheState
from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang import sglang_recorder
from kvscope_inside.sglang.pages import MAX_ENTRIES, reader_of
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_facts import hello_of
from kvscope_inside.sglang.sglang_recorder import SglangRecorder
from kvscope_inside.sglang.sglang_translator import SglangTranslator
from kvscope_inside.sglang.text_hashes import text_sums
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, Frame


@pytest.fixture(autouse=True)
def _no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_inside.sglang.sglang_facts._version", lambda: "0.0")
    monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", 1_000_000_000)


class PublishedScheduler:
    """A scheduler, and what is published of it."""

    def __init__(
        self, drafts_per_step: int = 0, name_of: Callable[[str], str | None] = lambda _: None, **options: int
    ) -> None:
        self.failures: list[str] = []
        self.hooks = Hooks(lambda name, error: self.failures.append(f"{name}: {error!r}"))
        self.scheduler = Scheduler(**options)
        self.scheduler.server_args.speculative_algorithm = "NGRAM" if drafts_per_step else None
        pools = pools_of(self.scheduler)
        self.reader = reader_of(self.scheduler.req_to_token_pool.req_to_token, pools)
        self.state = CacheState(hello_of(self.scheduler, 7))
        self.recorder = SglangRecorder(self.scheduler, self.hooks, self.reader, lambda: None)
        self.translator = SglangTranslator(self.state, pools=pools, drafts_per_step=drafts_per_step, name_of=name_of)
        self.frames: list[Frame] = []

    def add(self, name: str, tokens: list[int], max_tokens: int = 5, **more: Any) -> Request:
        return self.scheduler.add(Request(name, tokens, max_tokens, **more))

    def step(self) -> list[Event]:
        """Run a step of the scheduler, and return its events."""
        self.scheduler.step()
        return self.publish_notes()

    def finish(self) -> list[Event]:
        """Run until there is nothing to do, and return all events."""
        events: list[Event] = []
        while self.scheduler.waiting_queue or self.scheduler.running or self.scheduler.chunked_req is not None:
            events += self.step()
        return events + self.step()

    def publish_notes(self) -> list[Event]:
        told, is_whole = [], False
        while self.recorder.records:
            note = self.recorder.records.popleft()
            self.frames.append(self.translator.apply(note))
            told += self.frames[-1].events
            is_whole = note.pages is not None and note.pages.is_whole
        assert self.failures == []
        if is_whole:
            assert self.differences() == []
        return told

    def differences(self) -> list[str]:
        scheduler, ledger, found = self.scheduler, self.state.ledger, []
        num_rows, size = ledger.num_blocks, scheduler.size
        refs, in_tree = np.zeros(num_rows, int), np.zeros(num_rows, bool)
        in_tree[[node.page for node in scheduler.tree_cache.nodes.values()]] = True
        holders = [*scheduler.running, *([scheduler.chunked_req] if scheduler.chunked_req is not None else [])]
        tables = {each.rid: scheduler.table_of(each) for each in holders}
        for table in tables.values():
            refs[table] += 1
        state = np.where(refs > 0, BlockState.ACTIVE, BlockState.CACHED)
        free = np.zeros(num_rows, bool)
        free[scheduler.token_to_kv_pool_allocator.free_pages] = True
        state[free & (refs == 0)], state[0] = BlockState.FREE, BlockState.UNMAPPED
        for name, expected in (("state", state), ("ref_count", refs)):
            wrong = np.flatnonzero(getattr(ledger, name) != expected)
            found += [f"{name} of {page}: {getattr(ledger, name)[page]}, not {expected[page]}" for page in wrong]
        found += [f"hash of {page}" for page in np.flatnonzero((ledger.hash != 0) != in_tree)]
        locks = sum(node.lock_ref for node in scheduler.tree_cache.nodes.values())
        found += ["locks"] if locks != ledger.ref_count[in_tree].sum() else []
        found += [f"owner of {page}" for page in np.flatnonzero((ledger.owner == NO_OWNER) != (state % 3 == 0))]
        known = {each.info.request_id: each for each in self.state.requests.values()}
        found += ["requests"] if set(known) != set(tables) | {each.rid for each in scheduler.waiting_queue} else []
        for each in holders:
            told = known[each.rid]
            if told.tables[0] != tables[each.rid]:
                found.append(f"table of {each.rid}: {told.tables[0]}, not {tables[each.rid]}")
            figures = (told.num_computed_tokens, told.num_output_tokens, told.num_preemptions)
            if figures != (each.kv.kv_committed_len, len(each.output_ids), each.retraction_count):
                found.append(f"figures of {each.rid}: {figures}")
            for place, page in enumerate(tables[each.rid]):
                if ledger.filled[page] != min(max(each.kv.kv_committed_len - place * size, 0), size):
                    found.append(f"filled of {page}: {ledger.filled[page]}")
            published = tables[each.rid][: each.kv.cache_protected_len // size]
            if ledger.parent[published[1:]].tolist() != ledger.hash[published[:-1]].tolist():
                found.append(f"parents of {each.rid}")
        return found


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("copies_per_s", [1_000_000_000, 300])
@pytest.mark.parametrize("seed", range(3))
def test_sglang_state_is_published_correctly_under_random_load(
    page_size: int, copies_per_s: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_recorder, "COPIES_PER_S", copies_per_s)
    told, chance = PublishedScheduler(num_pages=14 * 4 // page_size, page_size=page_size), random.Random(seed)
    prefixes = [[chance.randrange(50) for _ in range(12)] for _ in range(3)]
    kinds: set[str] = set()
    for step in range(500):
        if chance.random() < 0.4 and len(told.scheduler.waiting_queue) < 4:
            tokens = chance.choice(prefixes)[: chance.randrange(13)] + [chance.randrange(50) for _ in range(5)]
            told.add(f"r{step}", tokens, chance.randrange(1, 20))
        if chance.random() < 0.03 and told.scheduler.collect_inflight_reqs():
            victim = chance.choice(sorted(each.rid for each in told.scheduler.collect_inflight_reqs()))
            told.scheduler.abort_request(Request(victim, []))
        kinds |= {event.kind for event in told.step()}
        if chance.random() < 0.02:
            kinds |= {event.kind for event in told.finish()}
            assert told.differences() == []
            assert told.scheduler.flush_cache()
            kinds |= {event.kind for event in told.step()}
            assert (told.state.ledger.state[1:] == BlockState.FREE).all()
    assert kinds >= {"admitted", "resumed", "preempted", "evicted", "finished", "aborted", "note"}
    totals = told.state.totals
    assert totals["admitted"] >= totals["finished"] > 10
    assert totals["generation_tokens"] == sum(
        len(frame.first_token_ns + frame.inter_token_ns) // 8 for frame in told.frames
    )


def event_of_kind(events: list[Event], kind: str) -> Event:
    return next(event for event in events if event.kind == kind)


def test_prefix_hit_says_why_it_was_not_longer() -> None:
    told = PublishedScheduler(num_pages=30)
    told.add("first", [*range(8), 40, 41, 42], 1)
    new = event_of_kind(told.finish(), "admitted")
    assert "all 11 tokens to compute" in new.cause
    assert "no cached prefix matches" in new.cause
    told.add("second", [*range(8), 30, 31, 32, 33, 34], 1)
    hit = event_of_kind(told.finish(), "admitted")
    assert hit.num_tokens == 8
    assert "8 of 13 tokens were there already, 2 blocks in the pool" in hit.cause
    assert told.state.totals["cached_tokens"] == 8
    assert told.state.ledger.prefix_hits.max() == 1


def test_evicted_prefix_is_missed_with_its_step() -> None:
    told = PublishedScheduler(num_pages=5)
    told.add("first", list(range(12)), 1)
    told.finish()
    told.add("other", [30 + each for each in range(16)], 1)
    events = told.finish()
    evicted = [event for event in events if event.kind == "evicted"]
    assert sum(event.num_blocks for event in evicted) == told.state.totals["evicted_blocks"] >= 1
    assert {event.other for event in evicted} == {2}
    assert "evicted for request #2" in evicted[0].cause
    evicted_at = next(frame.step for frame in told.frames if evicted[-1] in frame.events)
    assert any(frame.moves.evicted for frame in told.frames)
    told.add("again", list(range(12)), 1)
    assert f"was evicted at step {evicted_at}" in event_of_kind(told.finish(), "admitted").cause


@pytest.mark.parametrize(("num_free", "who"), [(0, 0), (4, 2), (11, 2), (12, 3), (99, 3)])
def test_eviction_names_the_first_request_that_free_pages_did_not_serve(num_free: int, who: int) -> None:
    told = PublishedScheduler(num_pages=9)
    requests = [Request(f"r{number}", [], extend_len=need) for number, need in enumerate([4, 0, 6, 4])]
    beneficiary = told.recorder._beneficiary
    assert beneficiary.first_uncovered(num_free) is None
    beneficiary._before_extend(Batch(None, requests))
    assert beneficiary.first_uncovered(num_free) is requests[who]
    for request in requests:
        request.kv.kv_committed_len = 5  # no request begins a page, and SGLang reserves one for each
    beneficiary._before_decode(Batch(None, requests))
    assert beneficiary.first_uncovered(8) is requests[2]
    requests[3].kv.kv_committed_len = 8
    assert beneficiary.first_uncovered(8) is requests[3]


def test_retraction_names_its_reason_and_the_lost_tokens() -> None:
    told = PublishedScheduler(num_pages=8)
    told.add("old", list(range(10)), 30)
    told.step()
    told.step()
    told.add("new", [30 + each for each in range(9)], 30)
    events: list[Event] = []
    while not events:
        events = [event for event in told.step() if event.kind == "preempted"]
    (event,) = events
    assert event.number == 2
    assert event.other == 1
    assert "having generated the fewest tokens" in event.cause
    assert told.state.requests[2].state == RequestState.PREEMPTED


def test_tokens_of_pages_are_known_while_running_and_cached() -> None:
    told = PublishedScheduler(num_pages=30)
    told.add("first", list(range(10)), 3)
    told.step()
    table = list(told.state.requests[1].tables[0])
    assert [content.token_ids for content in told.translator.contents(table)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    told.finish()
    assert [content.token_ids for content in told.translator.contents(table[:2])] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert told.translator.contents([999])[0].token_ids == ()


def test_same_text_of_another_adapter_has_other_hashes() -> None:
    told = PublishedScheduler(num_pages=30)
    told.add("first", list(range(9)), 1)
    told.finish()
    before = set(told.state.ledger.hash.tolist())
    told.scheduler.tree_cache.nodes.clear()  # the tree of the other
    told.add("second", list(range(9)), 1, extra_key="other")
    told.scheduler.step()
    told.scheduler.step()
    while told.recorder.records:
        told.translator.apply(told.recorder.records.popleft())
    assert len(set(told.state.ledger.hash.tolist()) - before) == 2


@pytest.mark.parametrize(
    ("more", "missed", "notes"),
    [
        ({}, "no cached prefix matches", ()),
        ({"extra_key": "mine"}, "no cached prefix matches", (("Extra key", "mine"),)),
        ({"cache_salt": "s"}, "its text is cached under another cache salt", (("Cache salt", "s"),)),
        (
            {"extra_key": "minea1", "lora_id": "a1"},
            "its text is cached under another LoRA adapter",
            (("LoRA", "poet"), ("Extra key", "mine")),
        ),
    ],
)
def test_reason_that_separates_equal_texts_is_published(more: dict[str, str], missed: str, notes: Any) -> None:
    told = PublishedScheduler(num_pages=30, name_of={"a1": "poet"}.get)
    told.add("first", list(range(9)), 1)
    told.finish()
    told.scheduler.tree_cache.match = lambda tokens: []  # type: ignore[method-assign] # the tree of the other
    told.add("second", list(range(9)) if more else list(range(1, 10)), 1, **more)
    told.scheduler.step()
    while told.recorder.records:
        told.frames.append(told.translator.apply(told.recorder.records.popleft()))
    assert missed in event_of_kind(list(told.frames[-1].events), "admitted").cause
    (page,) = {
        each for each in np.flatnonzero(told.state.ledger.owner == 2) if told.translator.pages.positions[each] == 1
    }
    (content,) = told.translator.contents([page])
    assert content.token_ids[:4] == ((4, 5, 6, 7) if more else (5, 6, 7, 8))
    assert content.notes == notes
    (told_of,) = [info for frame in told.frames for info in frame.new_requests if info.request_id == "second"]
    assert told_of.adapter == dict(notes).get("LoRA", "")


def test_images_are_noted_on_the_blocks_with_their_tokens() -> None:
    told = PublishedScheduler(num_pages=30)
    image = SimpleNamespace(modality=SimpleNamespace(name="IMAGE"), offsets=[(3, 6)])
    told.add("first", list(range(12)), 3, multimodal_inputs=SimpleNamespace(mm_items=[image]))
    told.step()
    table = list(told.state.requests[1].tables[0])
    words = (("Image", "tokens 3 to 6 of the prompt"),)
    assert [content.notes for content in told.translator.contents(table[:3])] == [words, words, ()]


def test_draft_tokens_are_counted() -> None:
    told = PublishedScheduler(num_pages=30, drafts_per_step=3)
    request = told.add("first", list(range(9)), 4)
    told.step()
    request.spec_verify_ct, request.spec_num_correct_drafts = 2, 5
    told.step()
    known = told.state.requests[1]
    assert (known.num_draft_tokens, known.num_accepted_tokens) == (6, 5)
    assert (told.state.totals["draft_tokens"], told.state.totals["accepted_tokens"]) == (6, 5)


def test_sglang_page_table_entries_above_the_copy_limit_come_with_the_next_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_ENTRIES >= 1 << 18
    monkeypatch.setattr("kvscope_inside.sglang.pages.MAX_ENTRIES", 3)
    told = PublishedScheduler(num_pages=60, page_size=1)
    told.add("long", list(range(12)), 9)
    told.step()
    assert told.state.requests[1].tables[0] == told.scheduler.table_of(told.scheduler.running[0])[:3]
    for _ in range(5):
        told.step()
    assert told.differences() == []


def test_sums_of_a_text_do_not_depend_on_where_it_was_split() -> None:
    tokens = np.arange(40, dtype=np.int64) * 7 % 11
    whole = text_sums(tokens, 0, 5)
    first = text_sums(tokens[:13], 0, 5)
    assert (np.concatenate((first, text_sums(tokens[13:], 13, int(first[-1])))) == whole).all()
    assert np.unique(whole).size == whole.size
    assert (text_sums(tokens[::-1], 0, 5)[1:] != whole[1:]).all()


def test_batches_distinguish_prefill_and_decode() -> None:
    told = PublishedScheduler(num_pages=30)
    told.add("long", list(range(14)), 3)
    told.finish()
    sizes = [(frame.batch.num_prefill_tokens, frame.batch.num_decode_tokens) for frame in told.frames]
    assert sizes[:4] == [(12, 0), (2, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    "hook", ["_before_run_batch", "_after_results", "_added", "_allocated_rows", "_before_free_row", "_pages"]
)
def test_failed_hook_ends_watching_and_sglang_goes_on(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(SglangRecorder, hook, broken)
    told, plain = PublishedScheduler(num_pages=30), Scheduler(num_pages=30)
    for each in (told.scheduler, plain):
        each.add(Request("a", list(range(9)), 6))
        while each.step():
            pass
    assert told.scheduler.token_to_kv_pool_allocator.free_pages.tolist() == (
        plain.token_to_kv_pool_allocator.free_pages.tolist()
    )
    assert len(told.failures) == 1
    assert "ours" in told.failures[0]
    assert not vars(told.scheduler).keys() & {"run_batch", "process_batch_result"}, "hooks are left"


def test_sglang_scheduler_methods_missing_for_hooks_are_named() -> None:
    class Older(Scheduler):
        send_abort_output = None  # type: ignore[assignment]

    hooks = Hooks(lambda name, error: None)
    scheduler = Older()
    reader = reader_of(scheduler.req_to_token_pool.req_to_token, pools_of(scheduler))
    SglangRecorder(scheduler, hooks, reader, lambda: None)
    assert hooks.missing == ["send_abort_output"]

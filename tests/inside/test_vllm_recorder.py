"""Notes of vLLM's scheduler become rows, tables, figures and events that equal its objects."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of
from tests.inside.fake_vllm import SIZE, Request, Scheduler, Status

from kvscope_inside import CacheState
from kvscope_inside.hooks import Hooks
from kvscope_inside.vllm.block_texts import hash_of_row
from kvscope_inside.vllm.offloading import offloading_of, unpublished_connectors
from kvscope_inside.vllm.vllm_recorder import VllmRecorder
from kvscope_inside.vllm.vllm_translator import VllmTranslator
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Event, Frame


class PublishedScheduler:
    """A scheduler, and what is published of it."""

    def __init__(self, *, limits: dict[str, int] | None = None, **options: int) -> None:
        self.failures: list[str] = []
        self.hooks = Hooks(lambda name, error: self.failures.append(f"{name}: {error!r}"))
        self.scheduler = Scheduler(**options)
        hello = hello_of(len(self.scheduler.pool.blocks), num_reserved=1)
        limits = {"max_num_seqs": 100, "max_num_batched_tokens": 1000} | (limits or {})
        offloading = offloading_of(self.scheduler)
        limits["num_host_blocks"] = offloading.num_blocks if offloading is not None else 0
        self.per_place = offloading.blocks_per_slot if offloading is not None else 1
        self.state = CacheState(replace(hello, cache=replace(hello.cache, **limits)))
        self.recorder = VllmRecorder(self.scheduler, self.hooks, lambda: None)
        self.translator = VllmTranslator(self.state, hash_block_size=SIZE, blocks_per_slot=self.per_place)
        self.frames: list[Frame] = []

    def add(self, name: str, tokens: list[int], max_tokens: int = 5, **more: Any) -> Request:
        request = Request(name, list(tokens), max_tokens, **more)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[Event]:
        """Run a step of the scheduler, and return its events."""
        self.scheduler.update_from_output(self.scheduler.schedule(), None)
        return self.publish_notes()

    def publish_notes(self) -> list[Event]:
        told = []
        while self.recorder.records:
            self.frames.append(self.translator.apply(self.recorder.records.popleft()))
            told += self.frames[-1].events
        assert self.failures == []
        assert self.differences() == []
        return told

    def differences(self) -> list[str]:
        ledger, found = self.state.ledger, []
        order = ledger.eviction_order
        queued = np.flatnonzero(order)
        if queued[np.argsort(order[queued])].tolist() != [b.block_id for b in self.scheduler.pool.free_block_queue]:
            found.append("order in which blocks are given out")
        for block in self.scheduler.pool.blocks[1:]:
            row, has_hash = block.block_id, block.block_hash is not None
            kind = BlockState.ACTIVE if block.ref_cnt else BlockState.CACHED if has_hash else BlockState.FREE
            if (ledger.state[row], ledger.ref_count[row], bool(ledger.hash[row])) != (kind, block.ref_cnt, has_hash):
                found.append(f"block {row} is {ledger.state[row]}, {ledger.ref_count[row]}: not {block}")
            if (ledger.owner[row] == NO_OWNER) != (kind == BlockState.FREE):
                found.append(f"owner of {row}")
        for request in self.state.requests.values():
            theirs = self.scheduler.requests[request.info.request_id]
            table = [block.block_id for block in self.scheduler.manager.req_to_blocks.get(theirs.request_id, ())]
            if request.tables[0] != table:
                found.append(f"table of {theirs.request_id}: {request.tables[0]}, not {table}")
            figures = (request.num_computed_tokens, request.num_output_tokens, request.num_preemptions)
            if figures != (theirs.num_computed_tokens, theirs.num_output_tokens, theirs.num_preemptions):
                found.append(f"figures of {theirs.request_id}: {figures}")
            for place, block in enumerate(table):
                if ledger.filled[block] < min(max(theirs.num_computed_tokens - place * SIZE, 0), SIZE):
                    found.append(f"filled of {block}")
        if set(self.scheduler.requests) != {each.info.request_id for each in self.state.requests.values()}:
            found.append("requests")
        return found + (self.host_differences() if ledger.num_blocks > len(self.scheduler.pool.blocks) else [])

    @property
    def manager(self) -> Any:
        """Return the offloading manager."""
        return self.scheduler.connector.connector_scheduler.manager

    def host_differences(self) -> list[str]:
        cache, manager = self.state.hello.cache, self.manager
        ledger, found = self.state.ledger.part(cache.num_blocks, cache.num_rows), []
        states = np.full(ledger.num_blocks, BlockState.FREE)
        for key, place in manager.places.items():
            rows, refs = slice(place * self.per_place, (place + 1) * self.per_place), manager.refs[key]
            states[rows] = BlockState.ACTIVE if refs else BlockState.CACHED
            own = 0 if refs < 0 else hash_of_row(key)
            told = (int(ledger.hash[rows][-1]), set(ledger.ref_count[rows].tolist()), set(ledger.filled[rows].tolist()))
            if told != (own, {abs(refs)}, {0 if refs < 0 else SIZE}):
                found.append(f"place {place}: {told}, not {own}, {refs}")
            if refs >= 0 and (ledger.hash[rows][:-1] != ledger.parent[rows][1:]).any():
                found.append(f"place {place}: its blocks do not follow each other")
        if (ledger.state != states).any() or (ledger.tier != Tier.HOST).any():
            found.append(f"states of host memory: {ledger.state}, not {states}")
        free = states == BlockState.FREE
        if ledger.hash[free].any() or ledger.filled[free].any() or (ledger.owner[free] != NO_OWNER).any():
            found.append("free places hold something")
        return found

    def keys(self, request: Request) -> list[bytes]:
        """Return the keys of the computed text, one for each slot."""
        num_full = request.num_computed_tokens // SIZE
        return [value + bytes(4) for value in request.block_hashes[self.per_place - 1 : num_full : self.per_place]]

    def offload(self, request: Request) -> list[bytes]:
        """Return the stored keys of the request, which are being written then."""
        output = self.manager.prepare_store(self.keys(request), SimpleNamespace(req_id=request.request_id))
        return output.keys_to_store if output is not None else []


@pytest.mark.parametrize("seed", range(4))
def test_vllm_state_is_published_correctly_under_random_load(seed: int) -> None:
    told, chance = PublishedScheduler(num_blocks=14), random.Random(seed)
    prefixes = [[chance.randrange(50) for _ in range(12)] for _ in range(3)]
    kinds: set[str] = set()
    for step in range(600):
        if chance.random() < 0.4 and len(told.scheduler.requests) < 6:
            tokens = chance.choice(prefixes)[: chance.randrange(13)] + [chance.randrange(50) for _ in range(5)]
            told.add(f"r{step}", tokens, chance.randrange(1, 20))
        if chance.random() < 0.05 and told.scheduler.requests:
            told.scheduler.finish_requests(chance.choice(sorted(told.scheduler.requests)), Status.FINISHED_ABORTED)
        if chance.random() < 0.05:
            told.scheduler.reset_prefix_cache()
        if chance.random() < 0.05:
            idle = [b.block_id for b in told.scheduler.pool.blocks if b.block_hash is not None and not b.ref_cnt]
            told.scheduler.pool.evict_blocks(set(idle[:2]))
            told.recorder.flush()
        kinds |= {event.kind for event in told.publish_notes()} | {event.kind for event in told.step()}
    assert kinds - {"note"} == {"admitted", "resumed", "preempted", "evicted", "finished", "aborted"}
    totals = told.state.totals
    assert totals["admitted"] >= totals["finished"] > 10
    assert sum(len(frame.first_token_ns) // 8 for frame in told.frames) > 10
    assert totals["generation_tokens"] == sum(
        len(frame.first_token_ns + frame.inter_token_ns) // 8 for frame in told.frames
    )


@pytest.mark.parametrize("blocks_per_slot", [1, 2, 3])
def test_offloaded_blocks_are_published_correctly(blocks_per_slot: int) -> None:
    told = PublishedScheduler(num_blocks=30, budget=40, num_slots=6, blocks_per_slot=blocks_per_slot)
    chance, writing, reading = random.Random(blocks_per_slot), set[bytes](), list[bytes]()
    prefix = [chance.randrange(50) for _ in range(12)]
    kinds: set[str] = set()
    for step in range(400):
        if chance.random() < 0.4 and len(told.scheduler.requests) < 4:
            told.add(f"r{step}", prefix + [chance.randrange(50) for _ in range(9)], chance.randrange(1, 20))
        if told.scheduler.running:
            writing |= set(told.offload(chance.choice(told.scheduler.running)))
        done = {key for key in sorted(writing) if chance.random() < 0.5}
        told.manager.complete_store(done, None, success=chance.random() < 0.8)
        writing -= done
        there = [key for key in told.manager.places if key not in writing]
        if there and chance.random() < 0.4:
            reading.append(chance.choice(there))
            told.manager.prepare_load(reading[-1:], None)
        if reading and chance.random() < 0.5:
            told.manager.complete_load([reading.pop(0)], None)
        if chance.random() < 0.02:
            told.manager.reset_cache()
            writing.clear()
            reading.clear()
        kinds |= {event.kind for event in told.step()}
    assert "evicted" in kinds
    assert told.state.totals["offloaded_blocks"] > 50
    assert any(frame.moves.saved for frame in told.frames)


def test_rows_of_offloaded_blocks_follow_the_pool_and_have_their_text() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40, num_slots=3)
    request = told.add("first", list(range(13)), 3)
    told.step()
    keys = told.offload(request)
    told.step()
    rows, table = [30, 31, 32], told.state.requests[1].tables[0][:3]
    ledger = told.state.ledger
    assert set(ledger.owner[rows].tolist()) == {1}
    told.manager.complete_store(keys, None)
    told.step()
    assert ledger.hash[rows].tolist() == ledger.hash[table].tolist()
    assert ledger.parent[rows].tolist() == ledger.parent[table].tolist()
    assert [content.token_ids for content in told.translator.contents(rows)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
    ]
    while told.scheduler.requests:
        told.step()
    other = told.add("other", list(range(20, 29)), 3)
    told.step()
    told.offload(other)
    event = event_of_kind(told.step(), "evicted")
    assert "2 blocks were evicted from host memory, where blocks of request #2 are kept now" in event.cause
    assert told.translator.contents([30])[0].token_ids == ()


def test_connector_with_unpublished_blocks_is_named() -> None:
    assert unpublished_connectors(Scheduler()) == "blocks that Connector may keep outside the pool are not shown"
    scheduler = Scheduler(num_slots=4)
    assert unpublished_connectors(scheduler) == ""
    scheduler.connector.connector_scheduler.manager.secondary_tiers = [SimpleNamespace()]
    scheduler.connector = SimpleNamespace(_connectors=[Scheduler().connector, scheduler.connector])
    assert (
        unpublished_connectors(scheduler)
        == "blocks that Connector, SimpleNamespace may keep outside the pool are not shown"
    )
    found = offloading_of(scheduler)
    assert found is not None
    assert found.num_blocks == 4


def event_of_kind(events: list[Event], kind: str) -> Event:
    return next(event for event in events if event.kind == kind)


def test_prefix_hit_says_why_it_was_not_longer() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40)
    told.add("first", [*range(12), 40, 41, 42, 43, 44], 1)
    new = event_of_kind(told.step(), "admitted")
    assert "all 17 tokens to compute" in new.cause
    assert "no cached prefix matches" in new.cause
    told.add("second", [*range(12), 30, 31, 32, 33, 34], 1)
    hit = event_of_kind(told.step(), "admitted")
    assert hit.num_tokens == 12
    assert "12 of 17 tokens were there already, 3 blocks in the pool" in hit.cause
    assert "it first differs from what is cached at token 12" in hit.cause
    assert told.state.totals["cached_tokens"] == 12
    assert told.state.ledger.prefix_hits.max() == 1


def test_evicted_prefix_is_missed_with_its_step() -> None:
    told = PublishedScheduler(num_blocks=6, budget=40)
    told.add("first", list(range(12)), 1)
    told.step()
    told.add("other", [30 + each for each in range(16)], 1)
    evicted = event_of_kind(told.step(), "evicted")
    assert evicted.other == 2
    assert "evicted" in evicted.cause
    assert told.frames[-1].moves.evicted
    told.add("again", list(range(12)), 1)
    assert "was evicted at step 2" in event_of_kind(told.step(), "admitted").cause


def test_waiting_time_of_a_preempted_request_begins_at_its_preemption() -> None:
    told = PublishedScheduler(num_blocks=7, budget=40)
    told.add("first", list(range(10)), 9)
    told.add("second", [30 + each for each in range(8)], 5)
    events = told.step()
    while "preempted" not in [event.kind for event in events]:
        events = told.step()
    preempted, frame = event_of_kind(events, "preempted"), told.frames[-1]
    assert frame.time_ns - frame.timings.commit_ns - frame.timings.run_ns > preempted.time_ns
    assert told.frames[-2].time_ns <= preempted.time_ns
    events = told.step()
    while "resumed" not in [event.kind for event in events]:
        events = told.step()
    resumed = event_of_kind(events, "resumed")
    assert resumed.data is not None
    assert resumed.data.waited_ns == resumed.time_ns - preempted.time_ns


def test_request_that_ends_in_the_step_of_its_eviction_is_named() -> None:
    told = PublishedScheduler(num_blocks=7, budget=40)
    told.add("first", list(range(16)), 1)
    told.step()
    last = told.add("last", [30 + each for each in range(8)], 2)
    while told.scheduler.requests:
        events = told.step()
    assert last.status.name == "FINISHED_LENGTH_CAPPED"
    evicted = event_of_kind(events, "evicted")
    assert evicted.other == event_of_kind(events, "finished").number == 2
    assert "for request #2" in evicted.cause


def test_preemption_names_the_request_that_needed_blocks_and_the_lost_tokens() -> None:
    told = PublishedScheduler(num_blocks=8, budget=40)
    told.add("old", list(range(15)), 20)
    told.add("new", [30 + each for each in range(9)], 20)
    events: list[Event] = []
    while not events:
        events = [event for event in told.step() if event.kind == "preempted"]
    (event,) = events
    assert (event.number, event.other) == (2, 1)
    assert (event.num_tokens, event.num_blocks) == (10, 3)
    assert "request #1 needed more blocks and none was available" in event.cause
    assert "being the newest" in event.cause


def test_text_cached_under_another_key_is_no_hit_and_reported() -> None:
    told = PublishedScheduler(num_blocks=40, budget=60)
    sql, python = SimpleNamespace(lora_name="sql"), SimpleNamespace(lora_name="python")
    for name, more, words in (
        ("plain", {}, "no cached prefix matches"),
        ("salted", {"cache_salt": "ours"}, "under another cache salt"),
        ("sql", {"lora_request": sql}, "under another LoRA adapter"),
        ("python", {"lora_request": python}, "under another LoRA adapter"),
    ):
        told.add(name, list(range(9)), 1, **more)
        assert words in event_of_kind(told.step(), "admitted").cause
    told.add("again", list(range(9)), 1, lora_request=python)
    assert "8 of 9 tokens were there already" in event_of_kind(told.step(), "admitted").cause


def test_blocks_have_their_adapter_salt_and_images() -> None:
    told = PublishedScheduler(num_blocks=40, budget=60)
    image = SimpleNamespace(modality="image", mm_position=SimpleNamespace(offset=2, length=5))
    key = {"lora_request": SimpleNamespace(lora_name="sql"), "cache_salt": "ours", "mm_features": [image]}
    told.add("picture", list(range(12)), 2, **key)
    told.step()
    table = list(told.state.requests[1].tables[0])
    notes = [content.notes for content in told.translator.contents(table)]
    of_key, of_image = (("LoRA", "sql"), ("Cache salt", "ours")), ("Image", "tokens 2 to 6 of the prompt")
    assert notes == [(*of_key, of_image), (*of_key, of_image), of_key]
    assert told.state.requests[1].info.adapter == "sql"
    while told.scheduler.requests:
        told.step()
    assert [content.notes for content in told.translator.contents(table)][:2] == notes[:2], (
        "cached blocks lost their notes"
    )


def test_next_request_in_the_queue_reports_what_it_waits_for() -> None:
    def first_waits(told: PublishedScheduler) -> WaitsFor:
        told.step()
        return told.state.requests[2].waits_for

    short = PublishedScheduler(num_blocks=4, budget=40)
    short.add("runs", list(range(5)), 4)
    short.add("waits", list(range(20, 29)), 2)
    assert first_waits(short) is WaitsFor.BLOCKS
    busy = PublishedScheduler(num_blocks=30, budget=8, limits={"max_num_batched_tokens": 8})
    busy.add("runs", list(range(20)), 4)
    busy.add("waits", list(range(20, 29)), 2)
    assert first_waits(busy) is WaitsFor.BUDGET
    few = PublishedScheduler(num_blocks=30, budget=40, max_running=1, limits={"max_num_seqs": 1})
    few.add("runs", list(range(5)), 4)
    few.add("waits", list(range(20, 29)), 2)
    assert first_waits(few) is WaitsFor.SEQUENCE_LIMIT
    while few.state.requests[2].state is RequestState.WAITING:
        few.step()
    assert few.state.requests[2].waits_for is WaitsFor.UNKNOWN


def test_request_that_waits_for_its_grammar_reports_it() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40)
    request = told.add("form", list(range(9)), 2)
    told.scheduler.waiting.remove(request)
    request.status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    told.scheduler.skipped_waiting.append(request)
    told.add("plain", list(range(20, 29)), 2)
    told.step()
    assert told.state.requests[1].waits_for is WaitsFor.GRAMMAR


def test_draft_tokens_are_counted() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40)
    told.add("guessed", list(range(9)), 6)
    told.step()
    output = told.scheduler.schedule()
    output.scheduled_spec_decode_tokens = {"guessed": [1, 2, 3]}
    outcome = SimpleNamespace(req_id_to_index={"guessed": 0}, sampled_token_ids=[[1, 2, 9]])
    told.scheduler.update_from_output(output, outcome)
    told.publish_notes()
    told_request = told.state.requests[1]
    assert (told_request.num_draft_tokens, told_request.num_accepted_tokens) == (3, 2)
    assert (told.state.totals["draft_tokens"], told.state.totals["accepted_tokens"]) == (3, 2)


def test_request_holds_its_blocks_while_kv_is_loaded_into_them() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40)
    request = told.add("loads", list(range(9)), 2)
    told.scheduler.start_loading(request, num_tokens=8)
    told.step()
    waiting = told.state.requests[1]
    assert (waiting.state, waiting.waits_for) == (RequestState.WAITING, WaitsFor.REMOTE_KV)
    assert (len(waiting.tables[0]), told.state.totals["loaded_blocks"]) == (2, 2)
    told.scheduler.end_loading(request)
    admitted = event_of_kind(told.step(), "admitted")
    assert "2 blocks loaded from lower tiers" in admitted.cause
    assert "8 of 9 tokens were there already, 0 blocks in the pool" in admitted.cause
    assert waiting.waits_for is WaitsFor.UNKNOWN


def test_tokens_of_blocks_are_known_while_running_and_cached() -> None:
    told = PublishedScheduler(num_blocks=30, budget=40)
    request = told.add("first", list(range(10)), 3)
    told.step()
    table = list(told.state.requests[1].tables[0])
    assert [content.token_ids for content in told.translator.contents(table)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    while told.scheduler.requests:
        told.step()
    assert [content.token_ids for content in told.translator.contents(table[:2])] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert told.translator.contents([999])[0].token_ids == ()
    assert request.num_output_tokens == 3


def test_batches_distinguish_prefill_and_decode() -> None:
    told = PublishedScheduler(num_blocks=30, budget=8)
    told.add("long", list(range(10)), 4)
    sizes: list[tuple[int, int]] = []
    while told.scheduler.requests:
        told.step()
        sizes.append((told.frames[-1].batch.num_prefill_tokens, told.frames[-1].batch.num_decode_tokens))
    assert sizes == [(8, 0), (2, 0), (0, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    "name", ["schedule", "update_from_output", "add_request", "_free_request", "get_new_blocks", "cache_full_blocks"]
)
def test_failed_hook_ends_watching_and_vllm_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = PublishedScheduler(num_blocks=30)
    plain = Scheduler(num_blocks=30)
    hook = {
        "schedule": "_after_schedule",
        "update_from_output": "_after_update",
        "add_request": "_added",
        "_free_request": "_finished",
        "get_new_blocks": "_allocated",
        "cache_full_blocks": "_cached",
    }[name]

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(VllmRecorder, hook, broken)
    told = PublishedScheduler(num_blocks=30)
    for each in (told.scheduler, plain):
        each.add_request(Request("a", list(range(9)), 6))
        while each.requests:
            each.update_from_output(each.schedule(), None)
    assert [(b.ref_cnt, b.block_hash) for b in told.scheduler.pool.blocks] == [
        (b.ref_cnt, b.block_hash) for b in plain.pool.blocks
    ]
    assert len(told.failures) == 1
    assert "ours" in told.failures[0]
    assert not vars(told.scheduler).keys() & {"schedule", "update_from_output"}, "hooks are left"

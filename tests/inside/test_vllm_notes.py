"""Notes of what vLLM does become what its objects say: rows, tables, figures, and events with their causes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.inside.conftest import hello_of
from tests.inside.fake_vllm import SIZE, Request, Scheduler, Status

from kvscope_inside import CacheState
from kvscope_inside.hooks import Hooks
from kvscope_inside.vllm.notes import StepNotes
from kvscope_inside.vllm.replay import Replay
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.telemetry import Event, Frame


class Told:
    """A scheduler, and what is told of it."""

    def __init__(self, **options: int) -> None:
        self.failures: list[str] = []
        self.hooks = Hooks(lambda name, error: self.failures.append(f"{name}: {error!r}"))
        self.scheduler = Scheduler(**options)
        self.state = CacheState(hello_of(len(self.scheduler.pool.blocks), num_reserved=1))
        self.notes = StepNotes(self.scheduler, self.hooks, lambda: None)
        self.replay = Replay(self.state, hash_block_size=SIZE)
        self.frames: list[Frame] = []

    def add(self, name: str, tokens: list[int], max_tokens: int = 5) -> Request:
        request = Request(name, list(tokens), max_tokens)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[Event]:
        """One of the scheduler's; the events of it."""
        self.scheduler.update_from_output(self.scheduler.schedule(), None)
        return self.tell()

    def tell(self) -> list[Event]:
        told = []
        while self.notes.notes:
            self.frames.append(self.replay.apply(self.notes.notes.popleft()))
            told += self.frames[-1].events
        assert self.failures == []
        assert self.differences() == []
        return told

    def differences(self) -> list[str]:
        ledger, found = self.state.ledger, []
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
        return found


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_is_told_as_it_is(seed: int) -> None:
    told, chance = Told(num_blocks=14), random.Random(seed)
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
            told.notes.flush()
        kinds |= {event.kind for event in told.tell()} | {event.kind for event in told.step()}
    assert kinds - {"note"} == {"admitted", "resumed", "preempted", "evicted", "finished", "aborted"}
    totals = told.state.totals
    assert totals["admitted"] >= totals["finished"] > 10
    assert sum(len(frame.first_token_ns) // 8 for frame in told.frames) > 10
    assert totals["generation_tokens"] == sum(
        len(frame.first_token_ns + frame.inter_token_ns) // 8 for frame in told.frames
    )


def by_kind(events: list[Event], kind: str) -> Event:
    return next(event for event in events if event.kind == kind)


def test_a_hit_is_told_with_why_it_was_not_more() -> None:
    told = Told(num_blocks=30, budget=40)
    told.add("first", [*range(12), 40, 41, 42, 43, 44], 1)
    new = by_kind(told.step(), "admitted")
    assert "all 17 tokens to compute" in new.cause
    assert "no cached prefix matches" in new.cause
    told.add("second", [*range(12), 30, 31, 32, 33, 34], 1)
    hit = by_kind(told.step(), "admitted")
    assert hit.num_tokens == 12
    assert "12 of 17 tokens were there already, 3 blocks in the pool" in hit.cause
    assert "it first differs from what is cached at token 12" in hit.cause
    assert told.state.totals["cached_tokens"] == 12
    assert told.state.ledger.prefix_hits.max() == 1


def test_a_prefix_that_was_evicted_is_missed_with_its_step() -> None:
    told = Told(num_blocks=6, budget=40)
    told.add("first", list(range(12)), 1)
    told.step()
    told.add("other", [30 + each for each in range(16)], 1)
    evicted = by_kind(told.step(), "evicted")
    assert evicted.other == 2
    assert "evicted" in evicted.cause
    assert told.frames[-1].moves.evicted
    told.add("again", list(range(12)), 1)
    assert "was evicted at step 2" in by_kind(told.step(), "admitted").cause


def test_a_preemption_says_for_whom_and_what_was_lost() -> None:
    told = Told(num_blocks=8, budget=40)
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


def test_tokens_of_blocks_are_known_while_they_run_and_while_they_are_cached() -> None:
    told = Told(num_blocks=30, budget=40)
    request = told.add("first", list(range(10)), 3)
    told.step()
    table = list(told.state.requests[1].tables[0])
    assert [content.token_ids for content in told.replay.contents(table)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    while told.scheduler.requests:
        told.step()
    assert [content.token_ids for content in told.replay.contents(table[:2])] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert told.replay.contents([999])[0].token_ids == ()
    assert request.num_output_tokens == 3


def test_batches_say_who_prefills_and_who_decodes() -> None:
    told = Told(num_blocks=30, budget=8)
    told.add("long", list(range(10)), 4)
    sizes: list[tuple[int, int]] = []
    while told.scheduler.requests:
        told.step()
        sizes.append((told.frames[-1].batch.num_prefill_tokens, told.frames[-1].batch.num_decode_tokens))
    assert sizes == [(8, 0), (2, 0), (0, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    "name", ["schedule", "update_from_output", "add_request", "_free_request", "get_new_blocks", "cache_full_blocks"]
)
def test_a_hook_that_raises_ends_ours_and_vllm_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(num_blocks=30)
    plain = Scheduler(num_blocks=30)
    hook = {
        "schedule": "_after_schedule",
        "update_from_output": "_after_update",
        "add_request": "_added",
        "_free_request": "_finished",
        "get_new_blocks": "_got_new",
        "cache_full_blocks": "_cached",
    }[name]

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(StepNotes, hook, broken)
    told = Told(num_blocks=30)
    for each in (told.scheduler, plain):
        each.add_request(Request("a", list(range(9)), 6))
        while each.requests:
            each.update_from_output(each.schedule(), None)
    assert [(b.ref_cnt, b.block_hash) for b in told.scheduler.pool.blocks] == [
        (b.ref_cnt, b.block_hash) for b in plain.pool.blocks
    ]
    assert len(told.failures) == 1
    assert "ours" in told.failures[0]
    assert not vars(told.scheduler).keys() & {"schedule", "update_from_output"}, "the hooks are gone"

"""A real engine followed over a connection that loses frames: the mirror ends equal to the ledger."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.recurrent_models import recurrent_config

from kvscope_engine import Engine, SamplingParams
from kvscope_telemetry.ledger import COLUMNS, BlockState, Tier
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Hello, TelemetryMessage
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.sync import Sync

Make = Callable[..., Engine]

SECOND_NS = 1_000_000_000


class LossyMirror:
    """A mirror that follows an engine like a live source, with the clock of the test, and loses the messages that
    `loses` selects.
    """

    def __init__(self, loses: Callable[[int], bool] = lambda count: False) -> None:
        self.mirror = Mirror()
        self.sync = Sync()
        self.num_lost = 0
        self._loses = loses
        self._count = 0
        self._now_ns = 0

    def receive(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self._count += 1
            if self._loses(self._count):
                self.num_lost += 1
                return
        message = decode_telemetry(encode(message))
        if isinstance(message, Frame):
            self.sync.frame(message, self._now_ns)
        elif isinstance(message, Heartbeat):
            self.sync.heartbeat(message, self._now_ns)
        elif isinstance(message, Hello):
            self.sync.want_snapshot()

    def tick(self, engine: Engine, elapsed_ns: int = SECOND_NS // 2) -> None:
        """Advance the clock: request a snapshot when due, and apply what was received."""
        self._now_ns += elapsed_ns
        self.sync.tick(self._now_ns)
        tag = self.sync.next_request(self._now_ns)
        if tag is not None:
            self.sync.sent(tag, self._now_ns)
            answer: Any = decode_reply(encode(engine.snapshot(tag)))
            self.sync.snapshot(answer, self._now_ns)
        for run in self.sync.drain_runs():
            self.mirror.apply(coalesce(run.frames, snapshot=run.snapshot))

    def settle(self, engine: Engine) -> None:
        """Wait some heartbeats, until a loss at the end was noticed."""
        for _ in range(4):
            self.receive(Heartbeat(epoch=engine.hello.epoch, time_ns=0, seq=engine.last_seq, step=engine.step_count))
            self.tick(engine, 3 * SECOND_NS)


def assert_mirrored(mirror: Mirror, engine: Engine) -> None:
    """Compare every column of every block, and every unfinished request with its table."""
    pool, requests = engine.components.pool, engine.components.scheduler.requests
    assert mirror.epoch == engine.hello.epoch
    assert mirror.seq == engine.last_seq
    for name in COLUMNS:
        assert np.array_equal(getattr(mirror.ledger, name), getattr(pool.ledger, name)), name
    counts = (mirror.num_free, mirror.num_cached, mirror.num_active)
    assert counts == (pool.num_free, pool.num_cached, pool.num_active)
    rows = mirror.requests
    assert sorted(rows.number[rows.state != RequestState.FINISHED].tolist()) == sorted(requests)
    for number, request in requests.items():
        row = rows.row_of(number)
        assert row is not None
        for group, table in enumerate(request.kv_tables):
            assert rows.table(number, group).tolist() == table
        assert int(rows.num_output_tokens[row]) == len(request.output_token_ids)
        assert int(rows.state[row]) == request.state
    assert mirror.counters == engine.snapshot().counters


def drive(engine: Engine, seed: int, num_steps: int, after_step: Callable[[], None]) -> None:
    """Run random requests, aborts and refusals in a small pool; some are unfinished at the end."""
    generator = random.Random(seed)
    prefix = generator.choices(range(3, 256), k=16)
    for step in range(num_steps):
        for number in range(generator.choice((0, 0, 1, 2))):
            ids = (prefix if generator.random() < 0.5 else []) + generator.choices(range(3, 256), k=20)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=generator.randint(1, 30), n=generator.choice((1, 1, 3))
            )
            name = f"r{seed}-{step}-{number}"
            engine.submit(Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling))
            if generator.random() < 0.2:
                engine.abort(name)
        if generator.random() < 0.02:
            engine.reset_prefix_cache()
        engine.step()
        after_step()


LINES: dict[str, Callable[[int], bool]] = {
    "nothing": lambda count: False,
    "every third": lambda count: count % 3 == 0,
    "all but every third": lambda count: count % 3 != 0,
    "long runs": lambda count: count % 40 < 15,
    "the first thirty": lambda count: count <= 30,
    "the last": lambda count: count > 100,
}


@pytest.fixture
def make_watched_engine(make_engine: Make) -> Callable[..., Engine]:
    """Function that makes an engine with mirrors that follow it: `make_watched_engine(*watchers, **options)`."""

    def make(*watchers: LossyMirror, **options: Any) -> Engine:
        def publish(message: TelemetryMessage) -> None:
            for watcher in watchers:
                watcher.receive(message)

        small = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 32, "max_num_seqs": 8}
        return make_engine(publish=publish, **(small | options))

    return make


TIERS = {"host_kv_memory_bytes": 20 * 2048, "disk_kv_memory_bytes": 300 * 4096, "preemption": "swap", "page_heat": 3}


WINDOWED: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 13,
    "query_pre_attn_scalar": 16,
}


@pytest.mark.parametrize("kv_groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("tiers", [{}, TIERS], ids=["the pool alone", "host memory and disk"])
def test_mirror_equals_the_ledger_whichever_frames_are_lost(
    make_watched_engine: Callable[..., Engine],
    tiny_model: Callable[..., str],
    tiers: dict[str, Any],
    kv_groups: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    watchers = {name: LossyMirror(loses) for name, loses in LINES.items()}
    more = {"model": tiny_model(**WINDOWED), "num_gpu_blocks_override": 90} if kv_groups else {}
    engine = make_watched_engine(*watchers.values(), **tiers, **more)
    assert len(engine.hello.cache.groups) == 2 * kv_groups
    checks = 0

    def after_step() -> None:
        nonlocal checks
        for watcher in watchers.values():
            watcher.tick(engine)
        if watchers["nothing"].sync.in_sync:
            assert_mirrored(watchers["nothing"].mirror, engine)
            checks += 1

    drive(engine, 1, 140, after_step)
    assert checks > 130
    assert engine.has_unfinished
    counters = engine.snapshot().counters
    assert counters.preemptions > 0
    assert counters.aborted > 0
    assert counters.evicted_blocks > 0
    assert bool(tiers) == (counters.swapped_blocks > 0) == (counters.loaded_blocks > 0)
    late = LossyMirror()
    late.sync.want_snapshot()
    for watcher in (*watchers.values(), late):
        watcher.settle(engine)
        assert_mirrored(watcher.mirror, engine)
    assert watchers["nothing"].sync.num_dropped == watchers["nothing"].sync.num_resyncs == 0
    assert watchers["every third"].num_lost > 40
    assert watchers["every third"].sync.num_dropped >= watchers["every third"].num_lost - 2


def run_prompts(engine: Engine, *prompts: list[int]) -> None:
    """Run prompts one after the other, each with a few output tokens."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        engine.submit(Submit(request_id=f"p{number}", prompt_token_ids=tuple(prompt), sampling=sampling))
        while engine.has_unfinished:
            engine.step()


def eviction_order_in_mirror(mirror: Mirror, tier: Tier) -> list[int]:
    """Return the rows of a tier in the eviction order of the mirror."""
    ledger = mirror.ledger
    rows = np.flatnonzero((ledger.tier == tier) & (ledger.eviction_order != 0))
    return rows[np.argsort(ledger.eviction_order[rows])].tolist()


@pytest.mark.parametrize("tiers", [{}, {"host_kv_memory_bytes": 12 * 2048, "preemption": "swap"}])
def test_cached_blocks_are_evicted_in_the_order_of_the_mirror(
    make_watched_engine: Callable[..., Engine], tiers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    watcher = LossyMirror()
    engine = make_watched_engine(watcher, num_gpu_blocks_override=24, **tiers)
    assert engine.hello.capabilities.eviction_order
    texts = [[*range(first, first + 22)] for first in (10, 60, 110, 160, 210)]
    run_prompts(engine, *texts, texts[3], texts[2][:9])  # the last two reuse what is cached
    pool = engine.components.pool
    pinned = eviction_order_in_ledger(engine)[2:4]
    engine.interventions.pin(pinned, "ann", with_prefix=False)
    run_prompts(engine, [5, 6, 7, 8, 9])
    watcher.settle(engine)
    assert_mirrored(watcher.mirror, engine)
    expected = eviction_order_in_mirror(watcher.mirror, Tier.HBM)
    assert len(expected) > 10
    assert not set(pinned) & set(expected)
    assert bool(eviction_order_in_mirror(watcher.mirror, Tier.HOST)) == bool(tiers)
    pool.allocate(pool.num_free, owner=1)
    host = engine.components.scheduler.tiers.host if tiers else None
    for place, block in enumerate(expected):
        if host is not None:
            ordered = sorted(np.flatnonzero(pool.ledger.eviction_order[24:]) + 24, key=pool.ledger.eviction_order.item)
            assert host.oldest(99) == ordered
        assert pool.allocate(1, owner=1) == [block], f"eviction {place}"
    assert pool.num_available == 0
    assert pool.num_cached == len(pinned)


def eviction_order_in_ledger(engine: Engine) -> list[int]:
    """Return the blocks of the pool in the eviction order of the engine's ledger."""
    pool = engine.components.pool
    order = pool.ledger.eviction_order[: pool.num_blocks]
    rows = np.flatnonzero(order)
    return rows[np.argsort(order[rows])].tolist()


def held_states(engine: Engine) -> dict[int, tuple[int, int]]:
    """Return for each request the row of its state and the number of its tokens."""
    first = engine.hello.cache.first_state
    return {
        each.number: (first + slot, each.num_saved_tokens or each.num_computed_tokens)
        for each in engine.components.scheduler.requests.values()
        if (slot := max(each.state_slot, each.saved_state_slot)) >= 0
    }


@pytest.mark.parametrize(
    "tiers",
    [
        pytest.param({}, marks=pytest.mark.storm),
        {"num_gpu_blocks_override": 24, "host_kv_memory_bytes": 1 << 17, "preemption": "swap"},
    ],
)
def test_mirror_has_separate_entries_for_recurrent_states(
    make_watched_engine: Callable[..., Engine], tmp_path: Path, tiers: dict[str, Any]
) -> None:
    """The mirror has the request of each state, even of saved states, whichever frames are lost."""
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps(recurrent_config("qwen3_next", vocab_size=256).to_dict(), default=str))
    watchers = [LossyMirror(), LossyMirror(LINES["every third"])]
    options = {"max_model_len": 128, "state_interval": 16, "state_checkpoints": 4, "max_num_seqs": 3}
    engine = make_watched_engine(*watchers, model=f"dummy:{path}", **options, **tiers)
    cache, (follows, late) = engine.hello.cache, (watchers[0].mirror, watchers[1].mirror)
    assert [group.kind for group in cache.groups] == ["full", "state"]
    num_states = cache.num_states + cache.num_host_states
    assert cache.num_rows == engine.components.pool.ledger.num_blocks == cache.first_state + num_states
    assert (cache.num_host_states > 0) == bool(tiers)
    assert cache.groups[1].block_bytes == engine.components.states.slot_bytes  # type: ignore[union-attr]
    seen: set[str] = set()

    def after_step() -> None:
        for watcher in watchers:
            watcher.tick(engine)
        if not watchers[0].sync.in_sync:
            return
        assert_mirrored(follows, engine)
        engine.components.scheduler.check_integrity()
        held, ledger = held_states(engine), follows.ledger
        told = {
            int(ledger.owner[row]): (row, int(ledger.filled[row]))
            for tier in (Tier.STATES, Tier.HOST_STATES)
            for row in cache.rows_by_tier[tier]
            if ledger.state[row] == BlockState.ACTIVE
        }
        assert told == held
        assert all(follows.requests.table(number, 1).tolist() == [row] for number, (row, _) in held.items())
        seen.update({"kept"} if follows.count(BlockState.CACHED, Tier.STATES) else ())
        seen.update({"kept below"} if follows.count(BlockState.CACHED, Tier.HOST_STATES) else ())
        seen.update({"swapped"} if follows.count(BlockState.ACTIVE, Tier.HOST_STATES) else ())
        seen.update({"restored"} if ledger.prefix_hits[cache.first_state :].any() else ())

    drive(engine, 1, 160, after_step)
    words = [event.cause for event in engine.components.scheduler.changes.drain_events()]
    assert seen == {"kept", "restored"} | ({"kept below", "swapped"} if tiers else set()), words
    for watcher in watchers:
        watcher.settle(engine)
        assert_mirrored(watcher.mirror, engine)
    counters = late.counters
    moved = (counters.swapped_states, counters.offloaded_states, counters.loaded_states)
    assert (min(moved) > 0) == (max(moved) > 0) == bool(tiers)
    held = held_states(engine)
    for number, content in zip(held, engine.block_text([row for row, _ in held.values()]), strict=True):
        assert (content.number, content.start + len(content.token_ids)) == (number, held[number][1])
    kept = np.flatnonzero(late.ledger.hash[cache.first_state :]) + cache.first_state
    for row, content in zip(kept.tolist(), engine.block_text(kept.tolist()), strict=True):
        assert content.start + len(content.token_ids) in (late.ledger.filled[row], 0), (
            "the state does not follow its block"
        )


def test_mirror_follows_a_restarted_engine(make_watched_engine: Callable[..., Engine]) -> None:
    """The old engine ends in the middle of its work; the new one has a new epoch and starts counting at one."""
    watchers = [LossyMirror(), LossyMirror(LINES["every third"])]
    first = make_watched_engine(*watchers)
    drive(first, 2, 50, lambda: [watcher.tick(first) for watcher in watchers] and None)
    assert first.has_unfinished
    first.close()
    second = make_watched_engine(*watchers)
    assert second.hello.epoch != first.hello.epoch
    drive(second, 3, 50, lambda: [watcher.tick(second) for watcher in watchers] and None)
    for watcher in watchers:
        watcher.settle(second)
        assert_mirrored(watcher.mirror, second)


# What blocks hold


IDS = tuple(random.Random(9).choices(range(3, 256), k=14))
GREEDY = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)


def submit(engine: Engine, name: str, ids: tuple[int, ...]) -> int:
    return engine.submit(Submit(request_id=name, prompt_token_ids=ids, sampling=GREEDY)).numbers[0]


def test_block_text_returns_the_tokens_of_running_requests_and_shared_blocks(make_engine: Make) -> None:
    engine = make_engine(block_size=4)
    first = submit(engine, "first", IDS)
    engine.step()
    second = submit(engine, "second", (*IDS[:12], 7, 8, 9))
    engine.step()
    requests, ledger = engine.components.scheduler.requests, engine.components.pool.ledger
    tables = {number: requests[number].block_table for number in (first, second)}
    assert tables[first][:3] == tables[second][:3]
    assert ledger.ref_count[tables[first][:3]].tolist() == [2, 2, 2]
    for number in (first, second):
        contents = engine.block_text(tables[number])
        token_ids = [token for content in contents for token in content.token_ids]
        assert token_ids == list(requests[number].tokens(0, requests[number].num_computed_tokens))
        assert [content.start for content in contents] == list(range(0, 4 * len(contents), 4))
        assert [content.block for content in contents] == tables[number]
        assert {content.number for content in contents[:3]} <= {first, second}
        assert {content.number for content in contents[3:]} == {number}


def test_cached_blocks_keep_their_tokens_until_they_are_evicted(make_engine: Make) -> None:
    engine = make_engine(block_size=4)
    number = submit(engine, "a", IDS)
    engine.step()
    request = engine.components.scheduler.requests[number]
    table: list[int] = []
    while engine.has_unfinished:
        table = list(request.block_table) or table
        engine.step()
    full = request.tokens(0, 32)
    contents = engine.block_text(table[:8])
    assert [token for content in contents for token in content.token_ids] == full
    assert set(engine.components.pool.ledger.state[table[:8]]) == {BlockState.CACHED}
    (last,) = engine.block_text(table[8:9])
    assert last.token_ids == (), "the last block was not full: it is free"
    engine.reset_prefix_cache()
    assert all(content.token_ids == () for content in engine.block_text(table))
    assert [content.block for content in engine.block_text((0, 10**9))] == [0, 10**9]

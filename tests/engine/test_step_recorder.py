"""Frames report every change, so that a mirror equals the ledger and the requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_engine.step_recorder import StepRecorder
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Frame, Hello, ModelInfo, Timings
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py
EPOCH = 77


class RecordedDrive:
    """A scheduler whose steps are recorded into a list of frames."""

    def __init__(self, drive: Any) -> None:
        self.drive = drive
        self.frames: list[Frame] = []
        self.dropped = 0
        self.recorder = StepRecorder(
            EPOCH,
            drive.pool,
            drive.scheduler,
            self.frames.append,
            messages_dropped=lambda: self.dropped,
        )

    def step(self) -> Frame:
        plan, result = self.drive.step()
        self.recorder.record(plan, result, Timings(run_ns=5), self.drive.step_count, self.drive.now_ns)
        return self.frames[-1]

    def idle(self) -> bool:
        return self.recorder.record_idle(self.drive.step_count, self.drive.now_ns)

    def late_mirror(self) -> Mirror:
        """Return a mirror that joins now."""
        mirror = Mirror()
        mirror.reset(self.recorder.snapshot(self.hello(), 3, self.drive.now_ns))
        return mirror

    def hello(self) -> Hello:
        cache = CacheInfo(num_blocks=self.drive.pool.num_blocks, block_size=self.drive.pool.block_size)
        return Hello(
            epoch=EPOCH,
            time_ns=0,
            wall_time_ns=0,
            model=ModelInfo(name="none"),
            cache=cache,
            device=DeviceInfo(kind="cpu"),
        )


def assert_mirrored(mirror: Mirror, recorded: RecordedDrive) -> None:
    """Compare every column of every block, and every unfinished request with its table."""
    pool, scheduler = recorded.drive.pool, recorded.drive.scheduler
    assert mirror.ledger.differences(pool.ledger) == []
    assert (mirror.num_free, mirror.num_cached, mirror.num_active) == (
        pool.num_free,
        pool.num_cached,
        pool.num_active,
    )
    rows = mirror.requests
    live = [int(n) for n in rows.number[rows.state != RequestState.FINISHED]]
    assert live == sorted(scheduler.requests)
    for request in scheduler.requests.values():
        row = rows.row_of(request.number)
        assert row is not None
        assert rows.request_ids[row] == request.request_id
        assert rows.table(request.number).tolist() == request.block_table
        for name in (
            "state",
            "num_computed_tokens",
            "num_cached_tokens",
            "num_preemptions",
            "num_prompt_tokens",
        ):
            assert int(getattr(rows, name)[row]) == getattr(request, name), name
        assert rows.num_output_tokens[row] == len(request.output_token_ids)


def random_change(recorded: RecordedDrive, rng: random.Random) -> None:
    """Submit, abort, fork or reset at random, or do nothing."""
    one = recorded.drive
    unfinished = list(one.scheduler.requests.values())
    what = rng.random()
    if what < 0.45:
        one.submit([rng.randrange(3)] * rng.randrange(1, 16), rng.randrange(1, 12), priority=rng.randrange(2))
    elif unfinished and what < 0.55:
        one.scheduler.abort(rng.choice(unfinished), one.now_ns)
    elif unfinished and what < 0.65:
        one.fork(rng.choice(unfinished))
    elif what < 0.67:
        one.scheduler.reset_prefix_cache(one.now_ns)


@pytest.mark.parametrize("seed", range(5))
def test_mirrors_equal_the_ledger_after_random_runs(drive: Make, seed: int) -> None:
    """One mirror follows from the start, some join late, and one gets all its frames coalesced."""
    rng = random.Random(seed)
    recorded = RecordedDrive(drive(num_blocks=14, block_size=rng.choice([2, 3, 4]), max_num_batched_tokens=12))
    mirrors = [recorded.late_mirror()]
    lazy, lazy_from = recorded.late_mirror(), len(recorded.frames)
    for count in range(150):
        random_change(recorded, rng)
        start = len(recorded.frames)
        recorded.idle() if rng.random() < 0.3 else recorded.step()
        joiner = recorded.late_mirror() if count % 30 == 29 else None
        for mirror in mirrors:
            if recorded.frames[start:]:
                mirror.apply(coalesce(recorded.frames[start:]))
            assert_mirrored(mirror, recorded)
        if joiner is not None:
            mirrors.append(joiner)
            assert_mirrored(joiner, recorded)
    lazy.apply(coalesce(recorded.frames[lazy_from:]))
    assert_mirrored(lazy, recorded)
    assert [frame.seq for frame in recorded.frames] == list(range(1, len(recorded.frames) + 1))
    assert recorded.drive.scheduler.totals.preemptions > 0


def test_snapshot_first_publishes_pending_changes(drive: Make) -> None:
    recorded = RecordedDrive(drive())
    recorded.step()
    request = recorded.drive.submit(range(9), 3)
    snapshot = recorded.recorder.snapshot(recorded.hello(), 42, recorded.drive.now_ns)
    assert (snapshot.seq, snapshot.tag, snapshot.step) == (2, 42, 1)
    assert [info.number for info in recorded.frames[-1].new_requests] == [request.number]
    assert [info.number for info in snapshot.requests_info] == [request.number]
    again = recorded.recorder.snapshot(recorded.hello(), 43, recorded.drive.now_ns)
    assert again.seq == 2
    assert len(recorded.frames) == 2


def test_nothing_is_published_without_a_change(drive: Make) -> None:
    recorded = RecordedDrive(drive())
    assert not recorded.idle()
    recorded.drive.submit([1, 2], 1)
    assert recorded.idle()
    assert not recorded.idle()
    assert recorded.recorder.seq == 1


def test_refusal_alone_is_published(drive: Make) -> None:
    recorded = RecordedDrive(drive())
    with pytest.raises(BadInput):
        recorded.drive.submit([], 1)
    assert recorded.idle()
    (frame,) = recorded.frames
    assert [event.kind for event in frame.events] == ["refused"]
    assert frame.counters.refused == 1
    assert frame.new_requests == ()


def test_only_new_blocks_of_a_table_are_published(drive: Make) -> None:
    recorded = RecordedDrive(drive(block_size=4))
    recorded.drive.submit(range(7), 8)
    sent = []
    for _ in range(6):
        rows = recorded.step().requests
        start, count = (int.from_bytes(column, "little") for column in (rows.table_start, rows.table_count))
        sent.append((start, count, len(rows.table_blocks) // 4))
    assert sent == [(0, 2, 2), (2, 0, 0), (2, 1, 1), (3, 0, 0), (3, 0, 0), (3, 0, 0)]


def test_telemetry_frame_contains_requests_and_token_counts_of_the_batch(drive: Make) -> None:
    recorded = RecordedDrive(drive(max_num_batched_tokens=10))
    recorded.drive.submit([1, 2], 9)
    recorded.step()
    recorded.drive.submit(range(20, 50), 2)
    frame = recorded.step()
    assert np.frombuffer(frame.batch.number, "<u4").tolist() == [1, 2]
    assert np.frombuffer(frame.batch.num_tokens, "<u4").tolist() == [1, 9]
    assert (frame.batch.num_prefill_tokens, frame.batch.num_decode_tokens) == (9, 1)
    assert frame.timings.run_ns == 5
    assert (frame.epoch, frame.step, frame.time_ns) == (EPOCH, 2, recorded.drive.now_ns)


def test_single_prompt_token_counts_as_prefill(drive: Make) -> None:
    recorded = RecordedDrive(drive())
    recorded.drive.submit([1], 9)
    assert recorded.step().batch.num_prefill_tokens == 1
    assert recorded.step().batch.num_decode_tokens == 1


def test_times_to_the_first_token_and_between_tokens_are_published(drive: Make) -> None:
    recorded = RecordedDrive(drive(max_num_batched_tokens=4))
    request = recorded.drive.submit(range(6), 3)
    frames = [recorded.step() for _ in range(4)]
    first = [np.frombuffer(frame.first_token_ns, "<u8").tolist() for frame in frames]
    inter = [np.frombuffer(frame.inter_token_ns, "<u8").tolist() for frame in frames]
    assert first == [[], [frames[1].time_ns - request.arrival_ns], [], []]
    assert inter == [[], [], [1_000_000], [1_000_000]]
    assert recorded.recorder._builder.last_token_ns == {}, "ended requests are still kept"


def test_telemetry_counters_equal_the_preemptions_evictions_and_tokens_of_the_scheduler(drive: Make) -> None:
    recorded = RecordedDrive(drive(num_blocks=8, block_size=4))
    rng = random.Random(1)
    requests = [recorded.drive.submit([rng.randrange(9) for _ in range(7)], 14) for _ in range(6)]
    victim = requests.pop()
    recorded.step()
    recorded.drive.scheduler.abort(victim, recorded.drive.now_ns)
    recorded.dropped = 4
    generated = 0
    while recorded.drive.scheduler.requests:
        recorded.step()
    counters = recorded.frames[-1].counters
    generated = sum(len(request.output_token_ids) for request in (*requests, victim))
    assert counters.generation_tokens == generated
    assert (counters.finished, counters.aborted, counters.messages_dropped) == (5, 1, 4)
    assert (counters.num_running, counters.num_waiting) == (0, 0)
    assert counters.preemptions == sum(request.num_preemptions for request in requests) > 0
    assert counters.evicted_blocks == recorded.drive.pool.evicted_blocks > 0
    prefill = sum(frame.batch.num_prefill_tokens for frame in recorded.frames)
    decode = sum(frame.batch.num_decode_tokens for frame in recorded.frames)
    assert counters.prompt_tokens <= prefill
    assert decode <= counters.generation_tokens


def test_every_event_is_published_once_and_in_order(drive: Make) -> None:
    recorded = RecordedDrive(drive(num_blocks=6, block_size=4, prefix_caching=False))
    recorded.drive.submit([1] * 7, 12)
    recorded.drive.submit([2] * 7, 12)
    while recorded.drive.scheduler.requests:
        recorded.step()
    kinds = [event.kind for frame in recorded.frames for event in frame.events]
    assert kinds == ["admitted", "admitted", "preempted", "finished", "resumed", "finished"]


def test_failed_step_is_published_as_well(drive: Make) -> None:
    """The run failed: nothing was committed, the requests end with an error, and a frame says so."""
    recorded = RecordedDrive(drive())
    one = recorded.drive
    mirror = recorded.late_mirror()
    request = one.submit(range(9), 3)
    plan: StepPlan = one.scheduler.schedule(1, one.now_ns)
    one.scheduler.finish(request, "error", one.now_ns)
    recorded.recorder.record(plan, None, Timings(), 1, one.now_ns)
    mirror.apply(coalesce(recorded.frames))
    assert_mirrored(mirror, recorded)
    assert recorded.frames[-1].events[-1].cause.startswith("ended by an error")


def test_mirror_that_joins_after_an_abort_ignores_the_request_in_the_next_frame(drive: Make) -> None:
    """A request is aborted between schedule and commit and published alone, before the step's own frame."""
    recorded = RecordedDrive(drive())
    one = recorded.drive
    request = one.submit(range(9), 3)
    plan = one.scheduler.schedule(1, one.now_ns)
    one.scheduler.abort(request, one.now_ns)
    mirror = recorded.late_mirror()
    one.scheduler.commit(plan, 1, 0)
    recorded.recorder.record(plan, StepResult(((),)), Timings(), 1, one.now_ns)
    mirror.apply(coalesce(recorded.frames[-1:]))
    assert_mirrored(mirror, recorded)


def test_telemetry_numbers_clients_and_does_not_contain_their_names(drive: Make) -> None:
    recorded = RecordedDrive(drive(num_blocks=32))
    for client in ("10.0.0.5", "", "key:alice", "10.0.0.5"):
        recorded.drive.submit(range(20), 4, client=client)
    announced = recorded.step().new_requests
    assert [info.client for info in announced] == [1, 0, 2, 1]
    hello = recorded.hello()
    assert [info.client for info in recorded.recorder.snapshot(hello, 0, 0).requests_info] == [1, 0, 2, 1]
    assert recorded.late_mirror().requests.client.tolist() == [1, 0, 2, 1]

"""Coalescing: many frames become one update, however they are batched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.ledger import COLUMNS
from kvscope_telemetry.messages.telemetry import Counters, DeviceSample, Frame, Heartbeat
from kvscope_telemetry.mirror.coalesce import coalesce, merge, size_of, state_after
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.source import SERIES_FIELDS, Update

NUM_FRAMES = 40


def _session() -> tuple[SimulatedEngine, Mirror, list[Frame]]:
    engine = SimulatedEngine(num_blocks=300, num_running=8, clock=iter(range(1, 10**9)).__next__)
    mirror = Mirror()
    mirror.reset(engine.snapshot())
    return engine, mirror, [engine.advance() for _ in range(NUM_FRAMES)]


def _assert_same(left: Update, right: Update) -> None:
    np.testing.assert_array_equal(left.block_ids, right.block_ids)
    for name in COLUMNS:
        np.testing.assert_array_equal(left.block_columns[name], right.block_columns[name])
    for name in SERIES_FIELDS:
        np.testing.assert_array_equal(left.series[name], right.series[name])
        assert left.series[name].dtype == np.int64
    for name in ("first_token_ns", "inter_token_ns"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert (left.new_requests, left.requests) == (right.new_requests, right.requests)
    assert (left.events, left.counters) == (right.events, right.counters)


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, NUM_FRAMES - 1)))
def test_coalesced_update_is_the_same_however_frames_are_batched(cuts: set[int]) -> None:
    _, _, frames = _session()
    borders = [0, *sorted(cuts), NUM_FRAMES]
    parts = [coalesce(frames[a:b]) for a, b in pairwise(borders)]
    _assert_same(merge(parts), coalesce(frames))


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, NUM_FRAMES - 1)))
def test_mirror_equals_the_engine_for_any_batching(cuts: set[int]) -> None:
    engine, mirror, frames = _session()
    borders = [0, *sorted(cuts), NUM_FRAMES]
    for a, b in pairwise(borders):
        mirror.apply(coalesce(frames[a:b]))
    assert mirror.ledger.equals(engine.ledger)
    assert mirror.seq == engine.seq


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, NUM_FRAMES - 1)))
def test_mirror_needs_only_its_declared_columns_of_frames(cuts: set[int]) -> None:
    _, mirror, frames = _session()
    _, other, _ = _session()
    borders = [0, *sorted(cuts), NUM_FRAMES]
    for a, b in pairwise(borders):
        mirror.apply(coalesce(frames[a:b]))
        other.apply(state_after(frames[a:b]))
        assert other.ledger.equals(mirror.ledger)
        assert (other.seq, other.step, other.time_ns) == (mirror.seq, mirror.step, mirror.time_ns)
        assert other.counters == mirror.counters
    assert equal_requests(other.requests, mirror.requests, REQUEST_COLUMNS)


def test_coalesced_update_has_one_series_entry_per_frame() -> None:
    _, _, frames = _session()
    series = coalesce(frames).series
    assert series["seq"].tolist() == [f.seq for f in frames]
    assert series["batch_size"].tolist() == [len(f.batch.number) // 4 for f in frames]
    assert series["prefill_tokens"].tolist() == [f.batch.num_prefill_tokens for f in frames]
    assert series["run_ns"].tolist() == [f.timings.run_ns for f in frames]
    assert series["generation_tokens"].tolist() == [f.counters.generation_tokens for f in frames]


def test_block_changed_twice_keeps_the_order_of_its_changes_in_a_coalesced_update() -> None:
    engine = SimulatedEngine(num_blocks=50)
    frames = []
    for state in (1, 2):
        engine.ledger.state[7] = state
        rows = engine.ledger.pack(np.array([7], np.uint32))
        frames.append(Frame(epoch=1, seq=state, step=state, time_ns=1, blocks=rows))
    update = coalesce(frames)
    assert update.block_ids.tolist() == [7, 7]
    assert update.block_columns["state"].tolist() == [1, 2]


def test_times_beyond_int64_are_clamped() -> None:
    frame = Frame(epoch=1, seq=1, step=1, time_ns=1, inter_token_ns=b"\xff" * 8, first_token_ns=b"\2" + 7 * b"\0")
    update = coalesce([frame])
    assert update.inter_token_ns.tolist() == [(1 << 63) - 1]
    assert update.first_token_ns.tolist() == [2]


def test_no_frames_give_an_empty_update() -> None:
    update = coalesce(())
    assert update.block_ids.size == 0
    assert not update.series
    assert update.counters is None
    assert size_of(update) == 0


def test_merged_updates_keep_all_device_samples_and_the_newest_heartbeat_and_counters() -> None:
    samples = [DeviceSample(epoch=1, time_ns=i) for i in range(3)]
    beats = [Heartbeat(epoch=1, time_ns=i, seq=i, step=i) for i in range(2)]
    frame = Frame(epoch=1, seq=1, step=1, time_ns=1, counters=Counters(admitted=3))
    merged = merge(
        [
            coalesce((), samples=samples[:2], heartbeat=beats[0]),
            coalesce([frame]),
            coalesce((), samples=samples[2:], heartbeat=beats[1]),
            coalesce(()),
        ]
    )
    assert merged.samples == tuple(samples)
    assert merged.heartbeat == beats[1]
    assert merged.counters == frame.counters

"""Peaks within a second, and tokens of steps that last longer than a second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import Span, span_of
from kvscope_telemetry.ledger import BlockRows, BlockState, pack_u4
from kvscope_telemetry.messages.telemetry import Batch, Counters, Frame, Heartbeat, Snapshot, TelemetryMessage, Timings
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.run_figures import BY_KEY
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, CarriedStep, Summary

MakeMessages = Callable[..., list[TelemetryMessage]]


def recorded_snapshot(make_messages: MakeMessages) -> Snapshot:
    return next(message for message in make_messages(1) if isinstance(message, Snapshot))


def frame_after(begun: Snapshot, seq: int, time_ns: int, **fields: Any) -> Frame:
    return Frame(epoch=begun.hello.epoch, seq=begun.seq + seq, step=begun.step + seq, time_ns=time_ns, **fields)


def block_rows(begun: Snapshot, ids: list[int], state: BlockState) -> BlockRows:
    """Return rows of the snapshot with another state."""
    follower = Follower()
    follower.feed(begun)
    follower.mirror.ledger.state[ids] = state
    return follower.mirror.ledger.pack(np.array(ids, np.uint32))


def test_peaks_are_the_maxima_over_all_frames_of_a_second(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(700).path)
    overview, follower = read_overview(recording), Follower()
    reached: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    second = -1
    for at_s, message in recording.messages():
        log_ns = recording.start_ns + round(at_s * 1e9)
        follower.apply_pending()
        mirror = follower.mirror
        if log_ns // SECOND_NS != second and mirror.hello is not None:
            second = log_ns // SECOND_NS
            reached[second].append((mirror.num_active, mirror.counters.num_running, mirror.counters.num_waiting))
        follower.feed(message)
        follower.apply_pending()
        second = log_ns // SECOND_NS
        reached[second].append((mirror.num_active, mirror.counters.num_running, mirror.counters.num_waiting))
    expected = np.array([np.max(reached[int(time_ns) // SECOND_NS], axis=0) for time_ns in overview.time_ns])
    for name, values in zip(("peak_active_blocks", "peak_running", "peak_waiting"), expected.T, strict=True):
        assert overview.column(name).tolist() == values.tolist()
    assert (overview.column("peak_active_blocks") > overview.column("active_blocks")).any()


def test_usage_peak_between_two_seconds_is_found_with_its_time(record: Callable[..., Any], make_messages: Any) -> None:
    begun = recorded_snapshot(make_messages)
    free = np.flatnonzero(np.frombuffer(begun.blocks.state, "u1") == BlockState.FREE)[:4].tolist()
    held, let_go = (block_rows(begun, free, state) for state in (BlockState.ACTIVE, BlockState.FREE))
    at_ns = begun.time_ns - (begun.hello.time_ns - begun.hello.wall_time_ns)
    to_next = begun.time_ns - at_ns % SECOND_NS + SECOND_NS  # the next whole second, by the engine's clock
    waits, idle = Counters(num_running=1, num_waiting=9), Counters(num_running=1)
    frames = [
        frame_after(begun, 1, to_next + 300_000_000, blocks=held, counters=waits),
        frame_after(begun, 2, to_next + 600_000_000, blocks=let_go, counters=idle),
        frame_after(begun, 3, to_next + 2_500_000_000, counters=idle),
    ]
    recording = Recording.open(record([begun.hello, begun, *frames]).path)
    found = summarize_run(recording, read_overview(recording), span_of(recording))
    level = np.count_nonzero(np.frombuffer(begun.blocks.state, "u1")[: begun.hello.cache.num_blocks] == 1)
    assert found.peak_usage == pytest.approx((level + 4) / begun.hello.cache.num_blocks)
    assert found.peak_usage_s is not None
    assert recording.state_at(found.peak_usage_s).num_active == level + 4
    assert recording.state_at(found.peak_usage_s - 0.001).num_active == level
    assert found.peak_waiting == 9


def seconds(*summaries: Summary) -> SessionOverview:
    overview = SessionOverview()
    overview.extend(summaries)
    return overview


def second(number: int, tokens: int = 0, step: CarriedStep | None = None) -> Summary:
    return Summary(time_ns=number * SECOND_NS, epoch=1, decode_tokens=tokens, carried_step=step)


def test_tokens_of_a_long_step_are_spread_over_its_seconds() -> None:
    step = CarriedStep(before_ns=2_500_000_000, length_ns=3_000_000_000, decode_tokens=12)
    overview = seconds(*map(second, range(5)), second(5, 14, step))
    assert overview.column("decode_tokens_per_s").tolist() == pytest.approx([0, 0, 2, 4, 4, 4])
    assert overview.column("decode_tokens").tolist() == [0, 0, 0, 0, 0, 14]


def test_rate_of_a_range_is_its_tokens_divided_by_its_time() -> None:
    step = CarriedStep(before_ns=2_500_000_000, length_ns=3_000_000_000, decode_tokens=12)
    overview = seconds(*map(second, range(5)), second(5, 14, step))
    span = Span(0, 4 * SECOND_NS, 6 * SECOND_NS - 1)
    tokens, rate = (BY_KEY[key].of(overview, span) for key in ("decode_tokens", "decode_tokens_per_s"))
    assert (tokens, rate) == (8, pytest.approx(4))
    whole = Span(0, 0, 6 * SECOND_NS)
    assert BY_KEY["decode_tokens"].of(overview, whole) == 14


def test_tokens_are_spread_over_recorded_seconds_only() -> None:
    step = CarriedStep(before_ns=3_000_000_000, length_ns=4_000_000_000, decode_tokens=12)
    overview = seconds(second(0), second(3), second(4, 12, step))
    assert overview.column("decode_tokens_per_s").tolist() == pytest.approx([0, 6, 6])
    assert seconds(second(4, 12, step)).column("decode_tokens_per_s").tolist() == [12]


def test_overview_second_that_is_replaced_removes_tokens_spread_to_earlier_seconds() -> None:
    step = CarriedStep(before_ns=1_000_000_000, length_ns=2_000_000_000, decode_tokens=12)
    overview = seconds(second(0), second(1), second(2, 12, step))
    overview.extend([second(2, 20, step)])
    assert overview.column("decode_tokens_per_s").tolist() == pytest.approx([0, 6, 14])
    overview.forget_before(SECOND_NS)
    overview.extend([second(2, 20)])
    assert overview.column("decode_tokens_per_s").tolist() == pytest.approx([0, 20])


@pytest.mark.parametrize("number", [-(1 << 70), 1 << 70])
def test_step_of_impossible_length_is_not_spread(number: int) -> None:
    step = CarriedStep(before_ns=number, length_ns=number, prefill_tokens=number)
    overview = seconds(second(0), second(1, 4, step))
    assert overview.column("decode_tokens_per_s").tolist() == [0, 4]


def test_summary_contains_the_step_that_started_before_the_second(
    record: Callable[..., Any], make_messages: Any
) -> None:
    begun = recorded_snapshot(make_messages)
    took = Timings(schedule_ns=100_000_000, run_ns=2_300_000_000, commit_ns=100_000_000)
    batch = Batch(number=pack_u4([1]), num_tokens=pack_u4([5]), num_prefill_tokens=5)
    steps = [
        frame_after(begun, place, begun.time_ns + place * 2_500_000_000, timings=took, batch=batch)
        for place in range(1, 5)
    ]
    beats = [
        Heartbeat(epoch=begun.hello.epoch, time_ns=begun.time_ns + half * 500_000_000, seq=begun.seq, step=begun.step)
        for half in range(1, 20)
    ]
    told = sorted([*beats, *steps], key=lambda message: message.time_ns)
    overview = read_overview(Recording.open(record([begun.hello, begun, *told]).path))
    assert overview.column("prefill_tokens_per_s")[1:-1].tolist() == pytest.approx([2.0] * (len(overview) - 2))
    assert overview.column("prefill_tokens_per_s").sum() == pytest.approx(20)
    assert 0 in overview.column("prefill_tokens")

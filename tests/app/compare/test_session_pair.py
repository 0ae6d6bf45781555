"""Tests of two timelines that are navigated and played together."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.app.compare.conftest import WAIT_S, wait_until_settled

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.comparison.alignment import Alignment

WAIT_MS = round(WAIT_S * 1000)
S = 1_000_000_000


def shows_recorded_state(session, time_ns):
    """Whether the session's mirror equals the recorded state at `time_ns`."""
    recording = session.source.recording
    expected = recording.state_at((time_ns - recording.start_ns) / 1e9)
    return session.mirror.seq == expected.seq and not session.mirror.ledger.differences(expected.ledger)


def seek(pair, seconds):
    pair.go_to(pair.origin_ns + round(seconds * 1e9))
    wait_until_settled(pair)


def test_seeking_compared_sessions_shows_both_at_the_same_time_after_their_start(make_pair):
    pair = make_pair()
    assert pair.range_ns == pair.a.timeline.range_ns
    for seconds in (2.0, 3.2, 0.5):
        seek(pair, seconds)
        at_ns = pair.a.timeline.range_ns[0] + round(seconds * 1e9)
        assert pair.cursor_ns == at_ns
        assert shows_recorded_state(pair.a, at_ns)
        assert shows_recorded_state(pair.b, pair.b.timeline.range_ns[0] + round(seconds * 1e9))


def test_session_without_data_at_the_cursor_stays_at_its_end(make_pair):
    pair = make_pair()
    seek(pair, 0.9 * pair.a.timeline.player.duration)
    assert shows_recorded_state(pair.a, pair.cursor_ns)
    assert pair.b.timeline.cursor_ns == pair.b.timeline.range_ns[1]
    assert [side.contains(pair.cursor_ns) for side in pair.sides] == [True, False]
    pair.go_live()
    wait_until_settled(pair)
    assert pair.cursor_ns == pair.a.timeline.range_ns[1]
    assert not pair.is_playing


def test_compared_recordings_can_be_aligned_by_clock_or_by_chosen_times(make_pair):
    pair = make_pair()
    assert pair.has_time_overlap
    seek(pair, 3.0)
    pair.align(Alignment())
    wait_until_settled(pair)
    assert pair.cursor_ns == pair.a.timeline.cursor_ns == pair.b.timeline.cursor_ns
    assert pair.b.timeline.cursor_ns > pair.b.timeline.range_ns[0]
    a_ns, b_ns = pair.a.timeline.range_ns[0] + 5 * S, pair.b.timeline.range_ns[0] + 1 * S
    pair.align(Alignment.of(a_ns, b_ns), a_ns)
    wait_until_settled(pair)
    assert (pair.a.timeline.cursor_ns, pair.b.timeline.cursor_ns) == (a_ns, b_ns)
    assert shows_recorded_state(pair.b, b_ns)


def test_time_range_of_a_comparison_covers_both_aligned_recordings(make_pair):
    pair = make_pair()
    a, b = pair.a.timeline.range_ns, pair.b.timeline.range_ns
    pair.align(Alignment.of(a[0], b[1]))
    length = (a[1] - a[0]) + (b[1] - b[0])
    assert pair.range_ns[1] - pair.range_ns[0] == length
    seek(pair, 1.0)
    assert pair.a.timeline.cursor_ns == pytest.approx(a[0], abs=S // 2)  # its first state is a little later
    assert shows_recorded_state(pair.b, b[0] + 1 * S)


@pytest.mark.parametrize("speed", [4.0, 64.0])
def test_both_recordings_play_together_to_the_end(make_pair, qtbot, speed):
    pair = make_pair()
    for session in (pair.a, pair.b):
        session.start()
    apart, looked_s = [], [time.monotonic()]

    def record_distance():
        before_s, looked_s[0] = looked_s[0], time.monotonic()
        if looked_s[0] - before_s > 0.2:  # the machine was busy, so that the distance was not observed
            return
        if pair.is_playing and all(side.continues_at(pair.cursor_ns + round(speed * S / 2)) for side in pair.sides):
            first, second = (side.cursor_ns for side in pair.sides)
            apart.append(abs(first - second) / S / speed)

    pair.cursor_changed.connect(record_distance)
    pair.set_speed(speed)
    pair.play()
    assert pair.is_playing
    qtbot.waitUntil(lambda: not pair.is_playing, timeout=WAIT_MS)
    wait_until_settled(pair)
    assert pair.cursor_ns == pair.range_ns[1]
    assert shows_recorded_state(pair.a, pair.a.timeline.range_ns[1])
    assert shows_recorded_state(pair.b, pair.b.timeline.range_ns[1])
    assert not apart or np.median(apart) < 0.5


def test_pausing_compared_sessions_stops_both_at_the_same_time(make_pair, qtbot):
    pair = make_pair()
    for session in (pair.a, pair.b):
        session.start()
    pair.play()
    qtbot.waitUntil(lambda: pair.cursor_ns > pair.origin_ns + S // 5, timeout=WAIT_MS)
    pair.pause()
    wait_until_settled(pair)
    first, second = (side.cursor_ns for side in pair.sides)
    assert abs(first - second) <= 1_000_000
    assert abs(pair.cursor_ns - first) <= 1_000_000
    assert not pair.a.timeline.is_playing
    assert not pair.b.timeline.is_playing


def test_compared_session_that_is_ahead_pauses_until_the_other_catches_up(make_pair, qtbot):
    pair = make_pair()
    pair.play()
    pair.b.timeline.player.seek(2.0)
    with qtbot.waitSignal(pair.cursor_changed, timeout=WAIT_MS):
        pass  # the pair compares both cursors
    assert not pair.b.timeline.is_playing
    assert pair.cursor_ns < pair.origin_ns + S
    pair.pause()


def test_step_moves_one_session_by_a_frame_and_the_other_follows(make_pair, qtbot):
    pair = make_pair()
    seek(pair, 2.0)
    for session in (pair.a, pair.b):
        session.start()
    before, before_ns = pair.a.mirror.seq, pair.cursor_ns
    pair.step_frames(1)
    qtbot.waitUntil(lambda: pair.cursor_ns > before_ns, timeout=WAIT_MS)
    wait_until_settled(pair)
    assert pair.a.mirror.seq == before + 1
    assert pair.sides[1].cursor_ns == pair.cursor_ns
    assert shows_recorded_state(pair.b, pair.b.timeline.cursor_ns)
    pair.align(Alignment.of(pair.a.timeline.range_ns[1], pair.b.timeline.range_ns[0]))
    seek(pair, pair.a.timeline.player.duration + 1.0)
    before = pair.b.mirror.seq
    pair.step_frames(-1)
    qtbot.waitUntil(lambda: pair.b.mirror.seq == before - 1, timeout=WAIT_MS)


def test_event_navigation_visits_events_of_both_recordings(make_pair):
    pair = make_pair()
    times = sorted(
        int(time_ns) - side.offset_ns for side in pair.sides for time_ns in side.session.overview.events.time_ns
    )
    seek(pair, 0.0)
    later = [time_ns for time_ns in times if time_ns > pair.cursor_ns]
    visited: list[int] = []
    while len(visited) < 4:
        assert pair.go_to_event(None, forward=True)
        if visited[-1:] != [pair.cursor_ns]:  # several events may have the same time
            visited.append(pair.cursor_ns)
    assert visited == sorted(set(later))[:4]
    assert pair.go_to_event(None, forward=False)
    assert pair.cursor_ns == visited[2]
    assert not pair.go_to_event(["refused"], forward=True) or pair.cursor_ns in times


def test_invalid_speed_is_refused(make_pair):
    pair = make_pair()
    with pytest.raises(BadInput):
        pair.set_speed(0.0)
    assert pair.speed == 1.0

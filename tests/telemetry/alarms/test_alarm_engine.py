"""When alarms ring and when not: each rule, one trouble one alarm, seconds that are missing, engines that restart."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, KINDS, Rule
from kvscope_telemetry.alarms.seconds import Second, seconds_of
from kvscope_telemetry.alarms.words import alarm_text, bookmark_of, rule_text, title_of
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

START_NS = 1_700_000_000 * SECOND_NS


def at(second: int) -> int:
    return START_NS + second * SECOND_NS


def usage(second: int, percent: float, epoch: int = 1) -> Second:
    return Second(at(second), epoch, active_blocks=percent, free_blocks=100 - percent, num_steps=10)


def only(kind: str, **changes: Any) -> AlarmEngine:
    return AlarmEngine([replace(KINDS[kind].rule, **changes)])


def run(engine: AlarmEngine, seconds: list[Second]) -> tuple[list[Alarm], list[Alarm]]:
    """Alarms that rang, and those that were over."""
    changed = [alarm for second in seconds for alarm in engine.feed(second)]
    return [a for a in changed if not a.until_ns], [a for a in changed if a.until_ns]


def test_over_for_its_seconds_and_no_less() -> None:
    engine = only("kv_usage")
    rang, over = run(engine, [usage(s, 96 if 10 <= s < 14 else 50) for s in range(30)])
    assert (rang, over) == ([], [])
    rang, over = run(only("kv_usage"), [usage(s, 96 if 10 <= s < 15 else 50) for s in range(20)])
    assert [(a.begin_ns, a.rang_ns) for a in rang] == [(at(10), at(15))]
    assert over == []  # calm for five seconds alone


def test_exactly_the_threshold_is_not_over_it() -> None:
    assert run(only("kv_usage"), [usage(s, 95.0) for s in range(20)]) == ([], [])


def test_one_trouble_is_one_alarm() -> None:
    """Up and down around the threshold for a minute, and a dip of some seconds: it goes on."""
    engine = only("kv_usage")
    wild = [usage(s, 99 if s % 3 else 94) for s in range(10, 70)]
    dip = [usage(s, 60) for s in range(70, 78)]
    again = [usage(s, 97) for s in range(78, 90)]
    calm = [usage(s, 60) for s in range(90, 110)]
    rang, over = run(engine, [*[usage(s, 97) for s in range(10)], *wild, *dip, *again, *calm])
    assert len(rang) == len(over) == 1
    assert over[0].begin_ns == at(0)
    assert over[0].until_ns == at(90)
    assert over[0].worst == 99
    assert engine.standing == []
    later, _ = run(engine, [usage(s, 97) for s in range(110, 120)])
    assert [a.begin_ns for a in later] == [at(110)]
    assert later[0].worst == 97  # not that of the one before


def test_between_is_neither_trouble_nor_calm() -> None:
    engine = only("kv_usage")
    run(engine, [usage(s, 97) for s in range(6)])
    assert run(engine, [usage(s, 93) for s in range(6, 100)]) == ([], [])
    assert len(engine.standing) == 1


def test_missing_seconds_are_no_trouble_and_no_calm() -> None:
    engine = only("kv_usage")
    assert run(engine, [usage(s, 97) for s in (0, 1, 2, 30, 31, 32, 60, 61, 62)]) == ([], [])
    rang, _ = run(engine, [usage(s, 97) for s in (63, 65, 66)])  # a single one may be missing
    assert len(rang) == 1
    calm = [usage(s, 10) for s in (70, 71, 90, 91, 110, 111)]
    assert run(engine, calm) == ([], [])


def test_another_engine_start_begins_anew() -> None:
    engine = only("kv_usage")
    rang, over = run(engine, [*[usage(s, 97) for s in range(8)], *[usage(s, 97, epoch=2) for s in range(8, 20)]])
    assert [a.epoch for a in rang] == [1, 2]
    assert [(a.epoch, a.until_ns) for a in over] == [(1, at(8))]
    assert rang[1].begin_ns == at(8)


def test_off_is_off() -> None:
    engine = AlarmEngine([replace(rule, is_on=False) for rule in DEFAULT_RULES])
    assert engine.is_idle
    assert run(engine, [usage(s, 100) for s in range(50)]) == ([], [])


def test_an_empty_pool_rings_nothing() -> None:
    assert run(AlarmEngine(DEFAULT_RULES), [Second(at(s), 1) for s in range(100)]) == ([], [])


def test_preemptions_are_a_rate_over_some_seconds() -> None:
    def second(place: int, count: int) -> Second:
        return Second(at(place), 1, preemptions=count, num_steps=1)

    assert run(only("preemptions"), [second(s, 5 if s == 10 else 0) for s in range(40)]) == ([], [])
    rang, over = run(only("preemptions"), [second(s, 6 if s == 10 else 0) for s in range(40)])
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == at(10)
    rang, _ = run(only("preemptions"), [second(s, 2 if s % 2 else 1) for s in range(60)])
    assert len(rang) == 1
    rang, _ = run(only("preemptions"), [second(s, 1) for s in range(60)])
    assert rang == []


def test_a_request_that_waits() -> None:
    waits = [Second(at(s), 1, longest_wait_s=max(0.0, s - 5.0)) for s in range(30)]
    rang, _ = run(only("waiting"), waits)
    assert [(a.begin_ns, a.rang_ns) for a in rang] == [(at(16), at(17))]
    over = run(only("waiting"), [*waits, *[Second(at(s), 1, longest_wait_s=0) for s in range(30, 40)]])[1]
    assert over[0].worst == 24
    assert alarm_text(over[0]) == "up to 24 s before its first step"


def test_recordings_of_before_tell_waits_when_they_end() -> None:
    rang, _ = run(only("waiting"), [Second(at(s), 1, queued_p99_s=12.0 if s == 9 else math.nan) for s in range(20)])
    assert [a.begin_ns for a in rang] == [at(9)]


def falling(second: int, rate: float, jitter: float = 0.0) -> Second:
    room = max(0.0, 1000 - rate * second + (jitter if second % 2 else -jitter))
    return Second(at(second), 1, active_blocks=1000 - room, free_blocks=room / 2, cached_blocks=room / 2)


def test_free_blocks_that_run_out() -> None:
    rang, _ = run(only("run_out"), [falling(s, 10) for s in range(110)])
    assert len(rang) == 1
    assert 68 <= (rang[0].begin_ns - START_NS) / 1e9 <= 72  # at 10 a second, 300 are gone in 30 s
    rang, _ = run(only("run_out"), [falling(s, 10, jitter=20) for s in range(110)])
    assert len(rang) == 1
    assert run(only("run_out"), [falling(s, 0, jitter=300) for s in range(110)]) == ([], [])
    assert run(only("run_out"), [falling(s, 0.5) for s in range(110)]) == ([], [])


def test_running_out_is_over_once_blocks_are_gone() -> None:
    engine = only("run_out")
    run(engine, [falling(s, 10) for s in range(100)])
    assert len(engine.standing) == 1
    run(engine, [falling(s, 10) for s in range(100, 115)])
    assert engine.standing == []


@pytest.mark.parametrize("kind", ["run_out", "waiting", "stuck", "kv_usage", "preemptions"])
def test_no_alarm_rings_for_an_engine_that_stands_still(kind: str) -> None:
    troubles = [
        falling(s, 10)._replace(longest_wait_s=s, stalled_s=s, preemptions=9, stopped_s=1.0) for s in range(60, 110)
    ]
    assert run(only(kind), troubles) == ([], [])
    assert run(only(kind), [second._replace(stopped_s=0.0) for second in troubles])[0]


def test_a_trouble_does_not_grow_older_while_the_engine_stands_still() -> None:
    full = [Second(at(s), 1, active_blocks=99, free_blocks=1) for s in range(30)]
    stands = [second._replace(stopped_s=1.0 if 2 <= s < 20 else 0.0) for s, second in enumerate(full)]
    assert [alarm.rang_ns for alarm in run(only("kv_usage"), stands)[0]] == [at(25)]


def test_a_hot_device_and_one_that_tells_nothing() -> None:
    assert run(only("hot"), [Second(at(s), 1) for s in range(60)]) == ([], [])
    seconds = [Second(at(s), 1, temperature_celsius=90.0 if s % 3 == 0 else math.nan) for s in range(60)]
    rang, _ = run(only("hot"), seconds)
    assert [a.rang_ns for a in rang] == [at(10)]


def test_holes_now_and_then_are_one_trouble() -> None:
    def lost(s: int) -> Second:
        return Second(at(s), 1, num_lost_frames=3 if s in (10, 25, 40) else 0)

    rang, over = run(only("frames_lost"), [lost(s) for s in range(100)])
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == at(10)
    assert alarm_text(rang[0]) == "3 frames"


class TestStuck:
    def run(self, stalls: list[tuple[float, int]], run_ns: float = 1e7) -> list[Alarm]:
        """(stalled_s, num_steps) of each second."""
        seconds = [
            Second(at(s), 1, stalled_s=stalled, num_steps=steps, run_ns=steps * run_ns)
            for s, (stalled, steps) in enumerate(stalls)
        ]
        return run(only("stuck"), seconds)[0]

    def test_no_step_for_half_a_minute(self) -> None:
        rang = self.run([(0.0, 50)] * 10 + [(float(s), 0) for s in range(1, 60)])
        assert len(rang) == 1
        assert rang[0].worst >= 31

    def test_an_idle_engine(self) -> None:
        assert self.run([(0.0, 0)] * 300) == []

    def test_a_busy_neighbour_makes_steps_long(self) -> None:
        """Each takes 12 s, then one 40 s."""
        slow = [(float(s % 12), int(s % 12 == 0)) for s in range(1, 120)]
        assert self.run([*slow, *[(float(s), 0) for s in range(1, 41)], (0.0, 1), *slow]) == []

    def test_what_was_usual_is_forgotten(self) -> None:
        once = [(float(s), 0) for s in range(29)] + [(0.0, 1)]
        quick = [(0.0, 50)] * 700
        stuck = [(float(s), 0) for s in range(1, 60)]
        assert len(self.run([*once, *quick, *stuck])) == 1
        assert self.run([*once, *quick[:100], *stuck]) == []

    def test_one_long_beat_is_not_enough(self) -> None:
        assert self.run([(0.0, 50)] * 5 + [(50.0, 0)] + [(0.0, 50)] * 5) == []

    def test_nothing_known_rings_nothing(self) -> None:
        assert self.run([(math.nan, 0)] * 100) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 4)), max_size=80), st.integers(0, 12))
def test_never_two_at_a_time_and_never_too_soon(told: list[tuple[float, int]], hold: int) -> None:
    """Whatever comes: alarms of a kind follow each other, each after its seconds, over only after some calm ones."""
    engine, time, alarm = only("kv_usage", seconds=float(hold)), 0, None
    for value, step in told:
        time += step
        for changed in engine.feed(usage(time, value)):
            if changed.until_ns:
                assert alarm is not None
                assert changed.begin_ns == alarm.begin_ns < changed.until_ns
                assert at(time + 1) - changed.until_ns >= 10 * SECOND_NS
                alarm = None
            else:
                assert alarm is None
                assert changed.rang_ns - changed.begin_ns >= max(hold, 1) * SECOND_NS
                assert changed.worst > 95
                alarm = changed
        assert [a.begin_ns for a in engine.standing] == ([alarm.begin_ns] if alarm else [])


def test_seconds_of_a_course_a_part_at_a_time_come_to_the_same() -> None:
    course = Course()
    for place in range(60):
        active = 98 if 20 <= place < 40 else 50
        course.extend([Summary(time_ns=at(place), epoch=3, active_blocks=active, free_blocks=100 - active)])
    at_once, by_parts = AlarmEngine(DEFAULT_RULES), AlarmEngine(DEFAULT_RULES)
    whole = run(at_once, list(seconds_of(course, 0, 60)))
    parts = [run(by_parts, list(seconds_of(course, first, first + 7))) for first in range(0, 60, 7)]
    assert whole[0]
    assert whole == ([a for rang, _ in parts for a in rang], [a for _, over in parts for a in over])


def test_words_and_bookmarks() -> None:
    rang, over = run(only("kv_usage"), [usage(s, 97.25 if s < 10 else 20) for s in range(30)])
    first, last = bookmark_of(rang[0]), bookmark_of(over[0])
    assert first.bookmark_id == last.bookmark_id
    assert (first.revision, last.revision) == (0, 1)
    assert (last.kind, last.time_ns, last.until_ns) == ("kv_usage", at(0), at(10))
    assert last.text == "up to 97.2 %"
    assert rule_text(KINDS["kv_usage"].rule) == "KV usage over 95 % for 5 s"
    assert rule_text(KINDS["preemptions"].rule) == "Preemptions over 1/s on average over 5 s"
    assert rule_text(KINDS["frames_lost"].rule) == "Any frame lost within 10 s"
    assert rule_text(Rule(kind="frames_lost", threshold=3, seconds=9)) == "More frames lost than 3 within 9 s"
    assert title_of("kv_usage") == "KV usage high"
    assert title_of("of_later") == "Of later"
    assert all(rule_text(rule) and title_of(rule.kind) for rule in DEFAULT_RULES)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_words_for_its_worst(kind: str) -> None:
    assert alarm_text(Alarm(KINDS[kind].rule, 1, 2, 3, 45.0))

"""When alarms ring and when not: each rule, one trouble one alarm, seconds that are missing, engines that restart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine, alarm_text, bookmark_of
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, Rule, parse_rule
from kvscope_telemetry.messages.telemetry import Stop
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

START_NS = 1_700_000_000 * SECOND_NS
RULES = {rule.name: rule for rule in DEFAULT_RULES}
KV_USAGE, PREEMPTIONS, WAITING, RUN_OUT = "KV usage high", "Many preemptions", "Long wait", "Blocks run out"
HOT, FRAMES_LOST, STUCK = "Temperature high", "Frames lost", "Engine stuck"


def at(second: int) -> int:
    return START_NS + second * SECOND_NS


def second_summary(second: int, epoch: int = 1, **more: Any) -> Summary:
    return Summary(time_ns=at(second), epoch=epoch, **{"longest_wait_s": 0.0, "stalled_s": 0.0, **more})


def usage(second: int, percent: float, epoch: int = 1) -> Summary:
    held = round(10 * percent)
    return second_summary(second, epoch, active_blocks=held, free_blocks=1000 - held, num_steps=10)


def stopped(summary: Summary) -> Summary:
    """The same second, paused all the time."""
    return replace(summary, stops=(Stop(begin_ns=summary.time_ns, end_ns=summary.time_ns + SECOND_NS),))


class Watched:
    """An engine of rules and the overview that it reads."""

    def __init__(self, *rules: Rule) -> None:
        self.engine, self.overview = AlarmEngine(rules), SessionOverview()

    def feed(self, seconds: list[Summary]) -> list[Alarm]:
        first = len(self.overview)
        self.overview.extend(seconds)
        return self.engine.read(self.overview, first, len(self.overview))


def only(name: str, **changes: Any) -> Watched:
    return Watched(replace(RULES[name], **changes))


def run(watched: Watched, seconds: list[Summary]) -> tuple[list[Alarm], list[Alarm]]:
    """Alarms that rang, and those that were over."""
    changed = watched.feed(seconds)
    return [a for a in changed if not a.until_ns], [a for a in changed if a.until_ns]


def test_over_for_its_seconds_and_no_less() -> None:
    watched = only(KV_USAGE)
    rang, over = run(watched, [usage(s, 96 if 10 <= s < 14 else 50) for s in range(30)])
    assert (rang, over) == ([], [])
    rang, over = run(only(KV_USAGE), [usage(s, 96 if 10 <= s < 15 else 50) for s in range(20)])
    assert [(a.begin_ns, a.rang_ns) for a in rang] == [(at(10), at(15))]
    assert over == []  # calm for five seconds alone


def test_exactly_the_threshold_is_not_over_it() -> None:
    assert run(only(KV_USAGE), [usage(s, 95.0) for s in range(20)]) == ([], [])


def test_one_trouble_is_one_alarm() -> None:
    """Up and down around the threshold for a minute, and a dip of some seconds: it goes on."""
    watched = only(KV_USAGE)
    wild = [usage(s, 99 if s % 3 else 94) for s in range(10, 70)]
    dip = [usage(s, 60) for s in range(70, 78)]
    again = [usage(s, 97) for s in range(78, 90)]
    calm = [usage(s, 60) for s in range(90, 110)]
    rang, over = run(watched, [*[usage(s, 97) for s in range(10)], *wild, *dip, *again, *calm])
    assert len(rang) == len(over) == 1
    assert over[0].begin_ns == at(0)
    assert over[0].until_ns == at(90)
    assert over[0].worst == 0.99
    assert watched.engine.standing == []
    later, _ = run(watched, [usage(s, 97) for s in range(110, 120)])
    assert [a.begin_ns for a in later] == [at(110)]
    assert later[0].worst == 0.97  # not that of the one before


def test_between_is_neither_trouble_nor_calm() -> None:
    watched = only(KV_USAGE)
    run(watched, [usage(s, 97) for s in range(6)])
    assert run(watched, [usage(s, 93) for s in range(6, 100)]) == ([], [])
    assert len(watched.engine.standing) == 1


def test_missing_seconds_are_no_trouble_and_no_calm() -> None:
    watched = only(KV_USAGE)
    assert run(watched, [usage(s, 97) for s in (0, 1, 2, 30, 31, 32, 60, 61, 62)]) == ([], [])
    rang, _ = run(watched, [usage(s, 97) for s in (63, 65, 66)])  # a single one may be missing
    assert len(rang) == 1
    calm = [usage(s, 10) for s in (70, 71, 90, 91, 110, 111)]
    assert run(watched, calm) == ([], [])


def test_another_engine_start_begins_anew() -> None:
    watched = only(KV_USAGE)
    rang, over = run(watched, [*[usage(s, 97) for s in range(8)], *[usage(s, 97, epoch=2) for s in range(8, 20)]])
    assert [a.epoch for a in rang] == [1, 2]
    assert [(a.epoch, a.until_ns) for a in over] == [(1, at(8))]
    assert rang[1].begin_ns == at(8)


def test_off_is_off() -> None:
    watched = Watched(*(replace(rule, is_on=False) for rule in DEFAULT_RULES))
    assert watched.engine.is_idle
    assert run(watched, [usage(s, 100) for s in range(50)]) == ([], [])


def test_an_empty_pool_rings_nothing() -> None:
    assert run(Watched(*DEFAULT_RULES), [second_summary(s) for s in range(100)]) == ([], [])


def test_preemptions_are_a_rate_over_some_seconds() -> None:
    def second(place: int, count: int) -> Summary:
        return second_summary(place, preemptions=count, num_steps=1)

    assert run(only(PREEMPTIONS), [second(s, 5 if s == 10 else 0) for s in range(40)]) == ([], [])
    rang, over = run(only(PREEMPTIONS), [second(s, 6 if s == 10 else 0) for s in range(40)])
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == at(10)
    rang, _ = run(only(PREEMPTIONS), [second(s, 2 if s % 2 else 1) for s in range(60)])
    assert len(rang) == 1
    rang, _ = run(only(PREEMPTIONS), [second(s, 1) for s in range(60)])
    assert rang == []


def test_a_request_that_waits() -> None:
    waits = [second_summary(s, longest_wait_s=max(0.0, s - 5.0)) for s in range(30)]
    rang, _ = run(only(WAITING), waits)
    assert [(a.begin_ns, a.rang_ns) for a in rang] == [(at(16), at(17))]
    over = run(only(WAITING), [*waits, *[second_summary(s, longest_wait_s=0) for s in range(30, 40)]])[1]
    assert over[0].worst == 24
    assert alarm_text(over[0]) == "up to 24 s"


def falling(second: int, rate: float, jitter: float = 0.0, **more: Any) -> Summary:
    room = round(max(0.0, 1000 - rate * second + (jitter if second % 2 else -jitter)))
    return second_summary(
        second, active_blocks=1000 - room, free_blocks=room // 2, cached_blocks=room - room // 2, **more
    )


def test_free_blocks_that_run_out() -> None:
    rang, _ = run(only(RUN_OUT), [falling(s, 10) for s in range(110)])
    assert len(rang) == 1
    assert 68 <= (rang[0].begin_ns - START_NS) / 1e9 <= 72  # at 10 a second, 300 are gone in 30 s
    assert alarm_text(rang[0]).startswith("down to ")
    rang, _ = run(only(RUN_OUT), [falling(s, 10, jitter=20) for s in range(110)])
    assert len(rang) == 1
    assert run(only(RUN_OUT), [falling(s, 0, jitter=300) for s in range(110)]) == ([], [])
    assert run(only(RUN_OUT), [falling(s, 0.5) for s in range(110)]) == ([], [])


def test_running_out_is_over_once_blocks_are_gone() -> None:
    watched = only(RUN_OUT)
    run(watched, [falling(s, 10) for s in range(100)])
    assert len(watched.engine.standing) == 1
    run(watched, [falling(s, 10) for s in range(100, 115)])
    assert watched.engine.standing == []


TROUBLES = [falling(s, 10, longest_wait_s=s, stalled_s=s, preemptions=9, num_running=50) for s in range(60, 110)]


@pytest.mark.parametrize(
    "rule", [*(RULES[name] for name in (RUN_OUT, WAITING, STUCK, KV_USAGE, PREEMPTIONS)), parse_rule("running > 8")]
)
def test_no_alarm_rings_for_an_engine_that_stands_still(rule: Rule) -> None:
    assert run(Watched(rule), [stopped(second) for second in TROUBLES]) == ([], [])
    assert run(Watched(rule), TROUBLES)[0]


def test_what_is_about_the_device_rings_while_the_engine_stands_still() -> None:
    hot = [stopped(second_summary(s, temperature_celsius=90.0)) for s in range(20)]
    assert run(only(HOT), hot)[0]
    rule = parse_rule("temperature_celsius > 80 and running > 8")
    assert run(Watched(rule), [replace(each, num_running=9) for each in hot]) == ([], [])


def test_a_trouble_does_not_grow_older_while_the_engine_stands_still() -> None:
    full = [usage(s, 99) for s in range(30)]
    stands = [stopped(second) if 2 <= s < 20 else second for s, second in enumerate(full)]
    assert [alarm.rang_ns for alarm in run(only(KV_USAGE), stands)[0]] == [at(25)]


def test_a_hot_device_and_one_that_tells_nothing() -> None:
    assert run(only(HOT), [second_summary(s) for s in range(60)]) == ([], [])
    seconds = [second_summary(s, temperature_celsius=90.0 if s % 3 == 0 else -1.0) for s in range(60)]
    rang, _ = run(only(HOT), seconds)
    assert [a.rang_ns for a in rang] == [at(10)]


def test_holes_now_and_then_are_one_trouble() -> None:
    rang, over = run(
        only(FRAMES_LOST), [second_summary(s, num_lost_frames=3 if s in (10, 25, 40) else 0) for s in range(100)]
    )
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == at(10)
    assert alarm_text(rang[0]) == "up to 3 frames"


class TestStuck:
    def run(self, stalls: list[tuple[float, int]], run_ns: float = 1e7) -> list[Alarm]:
        """(stalled_s, num_steps) of each second."""
        seconds = [
            second_summary(s, stalled_s=stalled, num_steps=steps, run_ns=round(steps * run_ns))
            for s, (stalled, steps) in enumerate(stalls)
        ]
        return run(only(STUCK), seconds)[0]

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
        assert self.run([(-1.0, 0)] * 100) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 4)), max_size=80), st.integers(0, 12))
def test_never_two_at_a_time_and_never_too_soon(given_seconds: list[tuple[float, int]], hold: int) -> None:
    """Whatever comes: alarms of a rule follow each other, each after its seconds, over only after some calm ones."""
    watched, time, alarm = only(KV_USAGE, seconds=float(hold)), 0, None
    for value, step in given_seconds:
        time += step
        for changed in watched.feed([usage(time, value)]):
            if changed.until_ns:
                assert alarm is not None
                assert changed.begin_ns == alarm.begin_ns < changed.until_ns
                assert at(time + 1) - changed.until_ns >= 10 * SECOND_NS
                alarm = None
            else:
                assert alarm is None
                assert changed.rang_ns - changed.begin_ns >= max(hold, 1) * SECOND_NS
                assert changed.worst > 0.95
                alarm = changed
        assert [a.begin_ns for a in watched.engine.standing] == ([alarm.begin_ns] if alarm else [])


def test_seconds_of_a_overview_a_part_at_a_time_come_to_the_same() -> None:
    overview, rules = SessionOverview(), (*DEFAULT_RULES, parse_rule("mean(kv_usage, 7) > 0.6 for 2 s"))
    overview.extend(replace(usage(s, 98 if 20 <= s < 40 else 50), preemptions=s % 7) for s in range(60))
    whole = AlarmEngine(rules).read(overview, 0, 60)
    assert {alarm.name for alarm in whole} >= {KV_USAGE, PREEMPTIONS, "mean(kv_usage, 7) > 0.6"}
    by_parts = AlarmEngine(rules)
    parts = [alarm for first in range(0, 60, 7) for alarm in by_parts.read(overview, first, min(first + 7, 60))]
    assert parts == whole


def test_a_rule_that_makes_no_sense_leaves_the_others() -> None:
    """One of another version, or written by hand."""
    watched = Watched(Rule(name="broken", expression="of_later > 3"), RULES[KV_USAGE])
    assert [a.name for a in run(watched, [usage(s, 97) for s in range(10)])[0]] == [KV_USAGE]


def test_bookmarks() -> None:
    rang, over = run(only(KV_USAGE), [usage(s, 97.2 if s < 10 else 20) for s in range(30)])
    first, last = bookmark_of(rang[0]), bookmark_of(over[0])
    assert first.bookmark_id == last.bookmark_id
    assert (first.revision, last.revision) == (0, 1)
    assert (last.kind, last.time_ns, last.until_ns) == (KV_USAGE, at(0), at(10))
    assert last.text == "up to 97.2 %"

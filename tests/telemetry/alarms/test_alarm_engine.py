"""Alarm rules over a session's seconds: when an alarm starts and ends, missing seconds, and engine restarts."""

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


def time_of_second(second: int) -> int:
    return START_NS + second * SECOND_NS


def second_summary(second: int, epoch: int = 1, **more: Any) -> Summary:
    return Summary(time_ns=time_of_second(second), epoch=epoch, **{"longest_wait_s": 0.0, "stalled_s": 0.0, **more})


def usage_summary(second: int, percent: float, epoch: int = 1) -> Summary:
    held = round(10 * percent)
    return second_summary(second, epoch, active_blocks=held, free_blocks=1000 - held, num_steps=10)


def paused_for_whole_second(summary: Summary) -> Summary:
    """Return the same second with the engine paused throughout."""
    return replace(summary, stops=(Stop(begin_ns=summary.time_ns, end_ns=summary.time_ns + SECOND_NS),))


class AlarmFixture:
    """An alarm engine and the overview that it reads."""

    def __init__(self, *rules: Rule) -> None:
        self.engine, self.overview = AlarmEngine(rules), SessionOverview()

    def feed(self, seconds: list[Summary]) -> list[Alarm]:
        first = len(self.overview)
        self.overview.extend(seconds)
        return self.engine.read(self.overview, first, len(self.overview))


def engine_with_rule(name: str, **changes: Any) -> AlarmFixture:
    return AlarmFixture(replace(RULES[name], **changes))


def started_and_ended(watched: AlarmFixture, seconds: list[Summary]) -> tuple[list[Alarm], list[Alarm]]:
    """Feed the seconds; return the alarms that started and those that ended."""
    changed = watched.feed(seconds)
    return [a for a in changed if not a.until_ns], [a for a in changed if a.until_ns]


def test_alarm_needs_the_whole_duration_above_the_threshold() -> None:
    watched = engine_with_rule(KV_USAGE)
    rang, over = started_and_ended(watched, [usage_summary(s, 96 if 10 <= s < 14 else 50) for s in range(30)])
    assert (rang, over) == ([], [])
    rang, over = started_and_ended(
        engine_with_rule(KV_USAGE), [usage_summary(s, 96 if 10 <= s < 15 else 50) for s in range(20)]
    )
    assert [(a.begin_ns, a.fired_ns) for a in rang] == [(time_of_second(10), time_of_second(15))]
    assert over == []  # only five calm seconds so far


def test_value_equal_to_the_threshold_starts_no_alarm() -> None:
    assert started_and_ended(engine_with_rule(KV_USAGE), [usage_summary(s, 95.0) for s in range(20)]) == ([], [])


def test_value_oscillating_around_the_threshold_is_one_alarm() -> None:
    """The value crosses the threshold for a minute and then dips for some seconds: the alarm continues."""
    watched = engine_with_rule(KV_USAGE)
    wild = [usage_summary(s, 99 if s % 3 else 94) for s in range(10, 70)]
    dip = [usage_summary(s, 60) for s in range(70, 78)]
    again = [usage_summary(s, 97) for s in range(78, 90)]
    calm = [usage_summary(s, 60) for s in range(90, 110)]
    rang, over = started_and_ended(watched, [*[usage_summary(s, 97) for s in range(10)], *wild, *dip, *again, *calm])
    assert len(rang) == len(over) == 1
    assert over[0].begin_ns == time_of_second(0)
    assert over[0].until_ns == time_of_second(90)
    assert over[0].worst == 0.99
    assert watched.engine.active == []
    later, _ = started_and_ended(watched, [usage_summary(s, 97) for s in range(110, 120)])
    assert [a.begin_ns for a in later] == [time_of_second(110)]
    assert later[0].worst == 0.97  # not the worst value of the previous alarm


def test_value_within_the_hysteresis_neither_starts_nor_ends_an_alarm() -> None:
    watched = engine_with_rule(KV_USAGE)
    started_and_ended(watched, [usage_summary(s, 97) for s in range(6)])
    assert started_and_ended(watched, [usage_summary(s, 93) for s in range(6, 100)]) == ([], [])
    assert len(watched.engine.active) == 1


def test_missing_seconds_neither_start_nor_end_an_alarm() -> None:
    watched = engine_with_rule(KV_USAGE)
    assert started_and_ended(watched, [usage_summary(s, 97) for s in (0, 1, 2, 30, 31, 32, 60, 61, 62)]) == ([], [])
    rang, _ = started_and_ended(watched, [usage_summary(s, 97) for s in (63, 65, 66)])  # a single second may be missing
    assert len(rang) == 1
    calm = [usage_summary(s, 10) for s in (70, 71, 90, 91, 110, 111)]
    assert started_and_ended(watched, calm) == ([], [])


def test_engine_restart_ends_the_alarm_and_starts_a_new_one() -> None:
    watched = engine_with_rule(KV_USAGE)
    rang, over = started_and_ended(
        watched, [*[usage_summary(s, 97) for s in range(8)], *[usage_summary(s, 97, epoch=2) for s in range(8, 20)]]
    )
    assert [a.epoch for a in rang] == [1, 2]
    assert [(a.epoch, a.until_ns) for a in over] == [(1, time_of_second(8))]
    assert rang[1].begin_ns == time_of_second(8)


def test_disabled_rules_start_no_alarm() -> None:
    watched = AlarmFixture(*(replace(rule, is_on=False) for rule in DEFAULT_RULES))
    assert watched.engine.is_idle
    assert started_and_ended(watched, [usage_summary(s, 100) for s in range(50)]) == ([], [])


def test_empty_pool_starts_no_alarm() -> None:
    assert started_and_ended(AlarmFixture(*DEFAULT_RULES), [second_summary(s) for s in range(100)]) == ([], [])


def test_preemption_alarm_uses_a_rate_over_several_seconds() -> None:
    def second(place: int, count: int) -> Summary:
        return second_summary(place, preemptions=count, num_steps=1)

    assert started_and_ended(engine_with_rule(PREEMPTIONS), [second(s, 5 if s == 10 else 0) for s in range(40)]) == (
        [],
        [],
    )
    rang, over = started_and_ended(engine_with_rule(PREEMPTIONS), [second(s, 6 if s == 10 else 0) for s in range(40)])
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == time_of_second(10)
    rang, _ = started_and_ended(engine_with_rule(PREEMPTIONS), [second(s, 2 if s % 2 else 1) for s in range(60)])
    assert len(rang) == 1
    rang, _ = started_and_ended(engine_with_rule(PREEMPTIONS), [second(s, 1) for s in range(60)])
    assert rang == []


def test_long_waiting_request_starts_an_alarm() -> None:
    waits = [second_summary(s, longest_wait_s=max(0.0, s - 5.0)) for s in range(30)]
    rang, _ = started_and_ended(engine_with_rule(WAITING), waits)
    assert [(a.begin_ns, a.fired_ns) for a in rang] == [(time_of_second(16), time_of_second(17))]
    over = started_and_ended(
        engine_with_rule(WAITING), [*waits, *[second_summary(s, longest_wait_s=0) for s in range(30, 40)]]
    )[1]
    assert over[0].worst == 24
    assert alarm_text(over[0]) == "up to 24 s"


def falling(second: int, rate: float, jitter: float = 0.0, **more: Any) -> Summary:
    room = round(max(0.0, 1000 - rate * second + (jitter if second % 2 else -jitter)))
    return second_summary(
        second, active_blocks=1000 - room, free_blocks=room // 2, cached_blocks=room - room // 2, **more
    )


def test_falling_free_blocks_start_the_run_out_alarm() -> None:
    rang, _ = started_and_ended(engine_with_rule(RUN_OUT), [falling(s, 10) for s in range(110)])
    assert len(rang) == 1
    assert 68 <= (rang[0].begin_ns - START_NS) / 1e9 <= 72  # at 10 a second, 300 are gone in 30 s
    assert alarm_text(rang[0]).startswith("down to ")
    rang, _ = started_and_ended(engine_with_rule(RUN_OUT), [falling(s, 10, jitter=20) for s in range(110)])
    assert len(rang) == 1
    assert started_and_ended(engine_with_rule(RUN_OUT), [falling(s, 0, jitter=300) for s in range(110)]) == ([], [])
    assert started_and_ended(engine_with_rule(RUN_OUT), [falling(s, 0.5) for s in range(110)]) == ([], [])


def test_alarm_about_blocks_running_out_ends_once_no_free_block_is_left() -> None:
    watched = engine_with_rule(RUN_OUT)
    started_and_ended(watched, [falling(s, 10) for s in range(100)])
    assert len(watched.engine.active) == 1
    started_and_ended(watched, [falling(s, 10) for s in range(100, 115)])
    assert watched.engine.active == []


TROUBLES = [falling(s, 10, longest_wait_s=s, stalled_s=s, preemptions=9, num_running=50) for s in range(60, 110)]


@pytest.mark.parametrize(
    "rule", [*(RULES[name] for name in (RUN_OUT, WAITING, STUCK, KV_USAGE, PREEMPTIONS)), parse_rule("running > 8")]
)
def test_no_engine_alarm_starts_while_the_engine_is_paused(rule: Rule) -> None:
    assert started_and_ended(AlarmFixture(rule), [paused_for_whole_second(second) for second in TROUBLES]) == ([], [])
    assert started_and_ended(AlarmFixture(rule), TROUBLES)[0]


def test_device_alarm_starts_while_the_engine_is_paused() -> None:
    hot = [paused_for_whole_second(second_summary(s, temperature_celsius=90.0)) for s in range(20)]
    assert started_and_ended(engine_with_rule(HOT), hot)[0]
    rule = parse_rule("temperature_celsius > 80 and running > 8")
    assert started_and_ended(AlarmFixture(rule), [replace(each, num_running=9) for each in hot]) == ([], [])


def test_paused_time_does_not_count_towards_the_duration() -> None:
    full = [usage_summary(s, 99) for s in range(30)]
    stands = [paused_for_whole_second(second) if 2 <= s < 20 else second for s, second in enumerate(full)]
    assert [alarm.fired_ns for alarm in started_and_ended(engine_with_rule(KV_USAGE), stands)[0]] == [
        time_of_second(25)
    ]


def test_temperature_alarm_ignores_seconds_without_a_reading() -> None:
    assert started_and_ended(engine_with_rule(HOT), [second_summary(s) for s in range(60)]) == ([], [])
    seconds = [second_summary(s, temperature_celsius=90.0 if s % 3 == 0 else -1.0) for s in range(60)]
    rang, _ = started_and_ended(engine_with_rule(HOT), seconds)
    assert [a.fired_ns for a in rang] == [time_of_second(10)]


def test_repeated_frame_losses_are_one_alarm() -> None:
    rang, over = started_and_ended(
        engine_with_rule(FRAMES_LOST),
        [second_summary(s, num_lost_frames=3 if s in (10, 25, 40) else 0) for s in range(100)],
    )
    assert len(rang) == len(over) == 1
    assert rang[0].begin_ns == time_of_second(10)
    assert alarm_text(rang[0]) == "up to 3 frames"


class TestStuck:
    def run(self, stalls: list[tuple[float, int]], run_ns: float = 1e7) -> list[Alarm]:
        """Return the alarms for seconds given as (stalled_s, num_steps)."""
        seconds = [
            second_summary(s, stalled_s=stalled, num_steps=steps, run_ns=round(steps * run_ns))
            for s, (stalled, steps) in enumerate(stalls)
        ]
        return started_and_ended(engine_with_rule(STUCK), seconds)[0]

    def test_thirty_seconds_without_a_step_start_the_stuck_alarm(self) -> None:
        rang = self.run([(0.0, 50)] * 10 + [(float(s), 0) for s in range(1, 60)])
        assert len(rang) == 1
        assert rang[0].worst >= 31

    def test_idle_engine_is_not_stuck(self) -> None:
        assert self.run([(0.0, 0)] * 300) == []

    def test_engine_with_long_steps_is_not_stuck(self) -> None:
        """Every step takes 12 s, and one takes 40 s."""
        slow = [(float(s % 12), int(s % 12 == 0)) for s in range(1, 120)]
        assert self.run([*slow, *[(float(s), 0) for s in range(1, 41)], (0.0, 1), *slow]) == []

    def test_usual_step_duration_is_forgotten_after_a_while(self) -> None:
        once = [(float(s), 0) for s in range(29)] + [(0.0, 1)]
        quick = [(0.0, 50)] * 700
        stuck = [(float(s), 0) for s in range(1, 60)]
        assert len(self.run([*once, *quick, *stuck])) == 1
        assert self.run([*once, *quick[:100], *stuck]) == []

    def test_one_long_stall_is_not_stuck(self) -> None:
        assert self.run([(0.0, 50)] * 5 + [(50.0, 0)] + [(0.0, 50)] * 5) == []

    def test_unknown_stall_time_starts_no_stuck_alarm(self) -> None:
        assert self.run([(-1.0, 0)] * 100) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 4)), max_size=80), st.integers(0, 12))
def test_alarms_of_a_rule_never_overlap_and_respect_the_duration(
    given_seconds: list[tuple[float, int]], hold: int
) -> None:
    """For any values, alarms of one rule follow each other, each after its duration, and end only after calm
    seconds.
    """
    watched, time, alarm = engine_with_rule(KV_USAGE, seconds=float(hold)), 0, None
    for value, step in given_seconds:
        time += step
        for changed in watched.feed([usage_summary(time, value)]):
            if changed.until_ns:
                assert alarm is not None
                assert changed.begin_ns == alarm.begin_ns < changed.until_ns
                assert time_of_second(time + 1) - changed.until_ns >= 10 * SECOND_NS
                alarm = None
            else:
                assert alarm is None
                assert changed.fired_ns - changed.begin_ns >= max(hold, 1) * SECOND_NS
                assert changed.worst > 0.95
                alarm = changed
        assert [a.begin_ns for a in watched.engine.active] == ([alarm.begin_ns] if alarm else [])


def test_reading_the_overview_in_parts_gives_the_same_alarms() -> None:
    overview, rules = SessionOverview(), (*DEFAULT_RULES, parse_rule("mean(kv_usage, 7) > 0.6 for 2 s"))
    overview.extend(replace(usage_summary(s, 98 if 20 <= s < 40 else 50), preemptions=s % 7) for s in range(60))
    whole = AlarmEngine(rules).read(overview, 0, 60)
    assert {alarm.name for alarm in whole} >= {KV_USAGE, PREEMPTIONS, "mean(kv_usage, 7) > 0.6"}
    by_parts = AlarmEngine(rules)
    parts = [alarm for first in range(0, 60, 7) for alarm in by_parts.read(overview, first, min(first + 7, 60))]
    assert parts == whole


def test_invalid_rule_does_not_disable_the_other_rules() -> None:
    """The rule may come from another version or was written by hand."""
    watched = AlarmFixture(Rule(name="broken", expression="of_later > 3"), RULES[KV_USAGE])
    assert [a.name for a in started_and_ended(watched, [usage_summary(s, 97) for s in range(10)])[0]] == [KV_USAGE]


def test_alarm_bookmark_is_updated_when_the_alarm_ends() -> None:
    rang, over = started_and_ended(
        engine_with_rule(KV_USAGE), [usage_summary(s, 97.2 if s < 10 else 20) for s in range(30)]
    )
    first, last = bookmark_of(rang[0]), bookmark_of(over[0])
    assert first.bookmark_id == last.bookmark_id
    assert (first.revision, last.revision) == (0, 1)
    assert (last.kind, last.time_ns, last.until_ns) == (KV_USAGE, time_of_second(0), time_of_second(10))
    assert last.text == "up to 97.2 %"

"""Running time is what a plain count of the nanoseconds outside all stops says, whatever stops there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.messages.telemetry import SUSPENDED, Event, EventData, Stop
from kvscope_telemetry.running_time import RunningTime, stop_text

MOMENTS = st.integers(0, 60)
STOPS = st.builds(
    lambda begin, length, kind, by: Stop(begin_ns=begin, end_ns=begin + length, kind=kind, by=by),
    MOMENTS,
    st.integers(1, 30),
    st.sampled_from(["paused", "suspended"]),
    st.sampled_from(["", "Ada", "Bob"]),
)


@given(st.lists(STOPS, max_size=8), st.lists(st.tuples(MOMENTS, MOMENTS), min_size=1, max_size=5))
def test_it_is_the_time_outside_of_all_stops(stops: list[Stop], pairs: list[tuple[int, int]]) -> None:
    time = RunningTime(stops)
    stopped = {at for stop in stops for at in range(stop.begin_ns, stop.end_ns)}
    wanted = [sum(at not in stopped for at in range(first, last)) for first, last in pairs]
    assert [time.running_ns(first, last) for first, last in pairs] == wanted
    firsts, lasts = (np.array(each, np.int64) for each in zip(*pairs, strict=True))
    assert time.running_between(firsts, lasts).tolist() == wanted
    stopped_ns = [max(0, last - first) - running for (first, last), running in zip(pairs, wanted, strict=True)]
    assert [time.stopped_ns(first, last) for first, last in pairs] == stopped_ns
    moved = time.shifted(1000)
    assert [moved.running_ns(first + 1000, last + 1000) for first, last in pairs] == wanted


def event(kind: str, time_ns: int, **fields: object) -> Event:
    return Event(kind=kind, time_ns=time_ns, data=EventData(kind=kind, **fields))  # type: ignore[arg-type]


def test_a_pause_goes_on_until_it_ends_and_a_single_step_is_running_time() -> None:
    time = RunningTime()
    time.record(event("engine_paused", 100, by="Ada"))
    assert time.open == Stop(begin_ns=100, by="Ada")
    assert time.running_ns(50, 1_000) == 50
    time.record(event("single_step", 300, by="Bob", lasted_ns=20))
    assert time.running_ns(50, 1_000) == 70
    time.record(event("engine_resumed", 500, by="Ada", lasted_ns=400))
    assert time.open is None
    assert [(stop.begin_ns, stop.end_ns, stop.by) for stop in time] == [(100, 280, "Ada"), (300, 500, "Ada")]
    assert time.running_ns(50, 1_000) == 570


def test_a_suspension_is_told_at_its_end_and_a_sleep_takes_no_time_of_the_clock() -> None:
    time = RunningTime()
    time.record(event("process_suspended", 500, lasted_ns=200))
    time.record(event("process_suspended", 900, lasted_ns=5_000, slept_ns=5_000))
    assert list(time) == [Stop(begin_ns=300, end_ns=500, kind=SUSPENDED)]
    assert [stop_text(stop) for stop in (*time, Stop(begin_ns=1, by="Ada"))] == ["process suspended", "paused by Ada"]


def test_the_same_stop_told_again_and_again_is_one() -> None:
    time = RunningTime()
    for end_ns in (20, 30, 45):
        time.add(Stop(begin_ns=10, end_ns=end_ns, by="Ada"))
    assert list(time) == [Stop(begin_ns=10, end_ns=45, by="Ada")]
    assert time.since(45) == ()
    time.forget_before(45)
    assert len(time) == 0

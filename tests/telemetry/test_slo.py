"""Latency goals: syntax and judgement, and what delayed a request according to the events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.messages.telemetry import Event, EventData, Stop
from kvscope_telemetry.request_delays import RequestDelays
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.slo import goals_text, judge, latencies_by_goal, missed_goals_text, read_goals

MS = 1_000_000
S = 1000 * MS


def event(kind: str, ms: int, number: int, **more: object) -> Event:
    return Event(kind=kind, time_ns=ms * MS, number=number, **more)  # type: ignore[arg-type]


def moments(arrival: int, started: int, first: int, ended: int, running: RunningTime | None = None) -> Moments:
    return Moments(arrival * MS, started * MS, first * MS, ended * MS, running or RunningTime())


def test_goals_round_trip_through_text() -> None:
    assert read_goals(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}
    assert goals_text(read_goals(["ttft:200", "tpot:12.5"])) == "ttft:200 tpot:12.5"


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5"])
def test_invalid_goal_is_named(text: str) -> None:
    with pytest.raises(BadInput, match=f"--goodput '{text}' is not accepted: ttft, tpot, e2el with milliseconds"):
        read_goals([text])


def test_goodput_is_the_share_of_requests_that_met_every_goal() -> None:
    took = {"ttft": np.array([0.1, 0.3, 0.1, np.nan, np.nan]), "tpot": np.array([0.01, 0.01, 0.09, 0.01, 0.09])}
    found = judge(took, {"ttft": 200.0, "tpot": 50.0})
    assert found.met.tolist() == [True, False, False, False, False]
    assert found.missed.tolist() == [False, True, True, False, True], "a missed goal counts whatever else is unknown"
    assert found.num_judged == 4
    assert found.goodput == 0.25
    assert judge({"ttft": np.array([])}, {"ttft": 1.0}).goodput is None


def test_paused_time_does_not_count_towards_goals() -> None:
    running = RunningTime([Stop(kind="paused", begin_ns=100 * MS, end_ns=900 * MS)])
    took = latencies_by_goal(moments(0, 50, 1000, 2000, running), 11)
    assert took == {"ttft": pytest.approx(0.2), "tpot": pytest.approx(0.1), "e2el": pytest.approx(1.2)}
    assert missed_goals_text(took, {"ttft": 150.0, "tpot": 150.0}) == ["TTFT 200.0 ms, goal 150 ms"]
    one = latencies_by_goal(Moments(0, 1, None, 5), 1)
    assert math.isnan(one["ttft"])
    assert one["tpot"] == 0, "a single token has no inter-token time"


def test_wait_for_a_full_batch_names_the_running_requests() -> None:
    events = [
        event("admitted", 0, 1),
        event("admitted", 10, 2),
        event("finished", 400, 2),
        event("admitted", 400, 3),
        event("finished", 900, 3),
        event("admitted", 900, 4),
        event("finished", 1500, 4),
    ]
    waited = RequestDelays(events, 2).chain(4, moments(100, 900, 950, 1500), 3)
    assert waited[0] == "waited 800.0 ms for a place in the batch behind #1, #3, #2 (2 running)"
    assert waited[1] == "its first token came 50.0 ms after it began"
    assert waited[2] == "wrote 3 tokens, 275.0 ms each on average, with up to 1 other running"
    for limit in (0, 1, 8):  # unknown, then changed, then not reached
        assert RequestDelays(events, limit).chain(4, moments(100, 900, 950, 1500), 3)[0].endswith("#1, #3, #2")
    assert RequestDelays(events, 2).chain(4, moments(895, 900, 950, 1500), 3)[0] == "waited 5.0 ms", (
        "the wait must not exceed the current step"
    )


def test_preemption_reason_names_cause_and_cost() -> None:
    taken = EventData(kind="preempted", num_needed=3, choice="newest")
    events = [
        event("admitted", 0, 7),
        event("admitted", 100, 8, num_tokens=4, data=EventData(kind="started", num_known_tokens=20)),
        event("preempted", 300, 8, other=7, num_tokens=24, num_blocks=2, data=taken),
        event("finished", 800, 7),
        event("resumed", 800, 8, num_tokens=16, data=EventData(kind="started", num_known_tokens=25)),
        event("finished", 1000, 8),
    ]
    chain = RequestDelays(events).chain(8, moments(0, 100, 200, 1000), 9)
    assert chain[0] == "waited 100.0 ms behind #7"
    assert chain[1] == "its first token came 100.0 ms after it began, 16 of 20 prompt tokens computed"
    assert chain[2].startswith("preempted for #7, 500.0 ms aside: request #7 needed 3 blocks")
    assert chain[3] == "recomputed 8 tokens"
    assert chain[4].startswith("wrote 9 tokens, 100.0 ms each")
    behind = RequestDelays(events).chain(9, moments(200, 900, 950, 990), 1)
    assert behind[0] == "waited 700.0 ms for blocks held by #7, #8 (#8 was preempted meanwhile)"


def test_requests_running_before_the_first_event_are_named_too() -> None:
    chain = RequestDelays([event("finished", 500, 3), event("refused", 510, 4)]).chain(
        5, moments(100, 520, 530, 600), 1
    )
    assert chain[0] == "waited 420.0 ms behind #3"


def test_delay_reason_of_a_request_uses_the_wait_reason_reported_by_the_engine() -> None:
    events = [event("admitted", 0, 1), event("admitted", 0, 2)]
    delays, one = RequestDelays(events, 2), moments(100, 900, 950, 1500)

    def waited(waits_for: WaitsFor) -> str:
        return delays.chain(4, one, 3, waits_for)[0]

    assert waited(WaitsFor.BLOCKS) == "waited 800.0 ms for blocks held by #1, #2"
    assert waited(WaitsFor.SEQUENCE_LIMIT) == "waited 800.0 ms for a place in the batch behind #1, #2 (2 running)"
    assert waited(WaitsFor.BUDGET) == "waited 800.0 ms for tokens of the step's budget, spent on #1, #2"
    assert waited(WaitsFor.GRAMMAR) == "waited 800.0 ms for the grammar of its answer"


def test_times_of_a_reason_add_up_to_the_total() -> None:
    events = [
        event("admitted", 0, 1),
        event("admitted", 60, 2),
        event("preempted", 65, 2, other=1),
        event("resumed", 75, 2),
        event("admitted", 0, 1),
        event("admitted", 60, 2),
        event("preempted", 200, 2, other=1),
        event("resumed", 500, 2),
        event("preempted", 600, 2, other=3),
        event("resumed", 700, 2),
        event("finished", 1000, 2),
    ]
    reason = RequestDelays(events).reason(2, moments(0, 60, 80, 1000), 5, WaitsFor.UNKNOWN, 2000)
    assert reason == (
        "preempted 3 times for #1, #3, 410.0 ms in total; waited 60.0 ms behind #1; prefill took 10.0 ms; "
        "decoded 5 tokens in 520.0 ms"
    )
    assert 410 + 60 + 10 + 520 == 1000


def test_request_that_ran_before_it_was_observed_is_not_said_to_have_waited() -> None:
    delays = RequestDelays()
    assert delays.reason(1, Moments(0), 40, WaitsFor.UNKNOWN, 30 * S) == ""
    assert delays.chain(1, Moments(0, ended_ns=30 * S), 40) == ()


def test_reason_of_a_waiting_request_counts_until_now() -> None:
    events = [event("admitted", 0, 1)]
    waiting = Moments(100_000_000)
    assert RequestDelays(events).reason(2, waiting, 0, WaitsFor.BLOCKS, 800_000_000) == (
        "waited 700.0 ms for blocks held by #1"
    )

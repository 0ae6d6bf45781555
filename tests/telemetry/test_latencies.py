"""What each latency counts, for one request and for many."""

from __future__ import annotations

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.latencies import LATENCIES, Moments, running_s, tokens_per_s
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame, Hello, Stop
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.summaries.summarizer import Summarizer

MS = 1_000_000


def test_latencies_are_differences_of_request_times() -> None:
    history = Moments(arrival_ns=10, started_ns=30, first_token_ns=35, ended_ns=75)
    assert (history.queue_ns, history.ttft_ns, history.prefill_ns) == (20, 25, 5)
    assert (history.decode_ns, history.inference_ns, history.total_ns) == (40, 45, 65)


def test_stops_of_the_engine_do_not_count_in_latencies() -> None:
    running = RunningTime([Stop(begin_ns=20, end_ns=25), Stop(begin_ns=32, end_ns=40), Stop(begin_ns=70)])
    history = Moments(arrival_ns=10, started_ns=30, first_token_ns=45, ended_ns=75, running=running)
    assert (history.queue_ns, history.ttft_ns, history.prefill_ns) == (15, 22, 7)
    assert (history.decode_ns, history.inference_ns, history.total_ns) == (25, 32, 47)
    pair = np.array([10, 45]) * 1_000_000_000, np.array([75, -1]) * 1_000_000_000
    assert running_s(*pair, RunningTime([Stop(begin_ns=20 * 10**9, end_ns=25 * 10**9)])).tolist()[0] == 60


def test_latency_with_an_unknown_time_is_unknown() -> None:
    history = Moments(arrival_ns=10, ended_ns=75)
    assert (history.queue_ns, history.ttft_ns, history.prefill_ns, history.decode_ns, history.inference_ns) == (
        None,
    ) * 5
    assert history.total_ns == 65
    assert Moments(arrival_ns=10, started_ns=4).queue_ns == 0  # clocks of two machines
    first = np.array([2_000_000_000, -1, 2_000_000_000])
    assert running_s(np.array([0, 0, -1]), first, RunningTime()).tolist()[0] == 2
    assert np.isnan(running_s(np.array([0, 0, -1]), first, RunningTime())[1:]).all()


def test_decode_speed_counts_the_tokens_after_the_first() -> None:
    second = 1_000_000_000
    found = tokens_per_s(
        np.array([11, 11, 1, 11]), np.array([0, -1, 0, 0]), np.array([2, 2, 2, 0]) * second, RunningTime()
    )
    assert found[0] == pytest.approx(5)
    assert np.isnan(found[1:]).all()


def test_queue_time_ends_with_the_first_run() -> None:
    """Waiting after a preemption is not queue time."""
    engine = SimulatedEngine(num_blocks=8, num_running=0)
    follower = Follower()
    summarizer = Summarizer(follower)
    begun = engine.snapshot()
    assert isinstance(begun.hello, Hello)
    waited = EventData(kind="started", waited_ns=50 * MS)
    long = EventData(kind="started", waited_ns=9_000 * MS)
    events = (
        Event(kind="admitted", time_ns=1, number=1, data=waited),
        Event(kind="resumed", time_ns=2, number=1, data=long),
    )
    at_ns = begun.time_ns
    frame = Frame(epoch=begun.hello.epoch, seq=begun.seq + 1, step=1, time_ns=at_ns + 1, events=events)
    for message in (begun, frame):
        assert not summarizer.add_message(message, at_ns)
        follower.feed(message)
    (second,) = summarizer.close()
    assert (second.queued.count, second.queued.p95_s) == (1, 0.05)
    assert {latency.key for latency in LATENCIES} == {"first_token", "inter_token", "queued"}

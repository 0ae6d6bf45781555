"""The process notices that it was suspended, and mistakes neither work nor a short delay for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.engine.conftest import Drive

from kvscope_engine.engine_pauses import Clocks, EnginePauses, Suspension, SuspensionWatch
from kvscope_telemetry.messages.telemetry import Event

SECOND = 1_000_000_000


class FakeClocks:
    """Clocks that the test sets."""

    def __init__(self) -> None:
        self.now, self.slept, self.worked = 100 * SECOND, 0, 0

    def __call__(self) -> Clocks:
        return Clocks(self.now, self.slept, self.worked)

    def advance(self, seconds: float, *, worked: float = 0.0, slept: float = 0.0) -> None:
        self.now += round(seconds * SECOND)
        self.worked += round(worked * SECOND)
        self.slept += round(slept * SECOND)


def test_engine_process_that_neither_works_nor_responds_counts_as_suspended() -> None:
    hands = FakeClocks()
    watch = SuspensionWatch(hands)
    assert not watch.poll(), "a suspension was found before the first beat"
    hands.advance(60)
    assert not watch.beat(), "the time before the first beat counted"
    hands.advance(0.5, worked=0.5)
    assert not watch.beat()
    hands.advance(42)
    assert watch.poll()
    assert watch.drain() == [Suspension(hands.now - 42 * SECOND, hands.now, 0)]
    hands.advance(5, worked=4.9)  # one computation blocked all threads
    assert not watch.beat()
    hands.advance(1.2)  # a busy machine
    assert not watch.beat()
    assert watch.drain() == []


def test_sleep_of_the_machine_counts_as_suspended_without_adding_engine_time() -> None:
    hands = FakeClocks()
    watch = SuspensionWatch(hands)
    watch.beat()
    hands.advance(0.3, slept=3_600)
    assert watch.beat()
    (found,) = watch.drain()
    assert (found.start_ns, found.end_ns, found.lasted_ns) == (hands.now, hands.now, 3_600 * SECOND)


def test_suspension_is_an_event_and_excluded_from_latencies(drive: Callable[..., Drive]) -> None:
    hands, driven = FakeClocks(), drive()
    recorded: list[Event] = []
    scheduler = driven.scheduler
    stops = EnginePauses(
        scheduler, lambda: (stops.record_suspensions(), recorded.extend(scheduler.changes.drain().events))[1], hands
    )
    assert not stops.beat()
    begun_ns = hands.now
    hands.advance(42)
    assert stops.beat(), "there is something to tell"
    stops.report_suspensions()
    (event,) = recorded
    assert (event.kind, event.cause) == ("process_suspended", "the process was suspended for 42.0 s")
    assert scheduler.running_time.running_ns(begun_ns - SECOND, hands.now + SECOND) == 2 * SECOND
    hands.advance(0.5, slept=10)
    assert stops.beat()
    stops.report_suspensions()
    assert "the machine slept for 10.0 s" in recorded[1].cause
    assert scheduler.running_time.stopped_ns(0, hands.now) == 42 * SECOND


BEATS = """
import time
from kvscope_engine.engine_pauses import SuspensionWatch
watch = SuspensionWatch()
print("begun", flush=True)
while not watch.beat():
    time.sleep(0.1)
(found,) = watch.drain()
print(found.lasted_ns / 1e9, flush=True)
"""


def test_process_stopped_by_a_signal_reports_the_duration() -> None:
    with subprocess.Popen([sys.executable, "-c", BEATS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)
        begun_s = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        lasted_s = float(process.stdout.readline())
    assert 2.4 < lasted_s < time.monotonic() - begun_s + 0.5

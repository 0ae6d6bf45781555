"""The record of changes between two frames."""

from __future__ import annotations

from kvscope_engine.policy.kv_cache.move_log import MoveLog
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.changes import MAX_EVENTS, ChangeLog
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Event


def make_request(number: int) -> Request:
    return Request(number, f"r{number}", [1], ResolvedSampling(), 1, 0)


def test_a_table_is_unchanged_up_to_the_first_of_its_changes() -> None:
    log, request = ChangeLog(MoveLog()), make_request(1)
    for unchanged in (5, 3, 7):
        log.table(request, unchanged)
    assert log.drain().tables == {1: 3}


def test_each_request_is_told_once_in_order() -> None:
    log, one, two = ChangeLog(MoveLog()), make_request(1), make_request(2)
    log.add(two)
    log.table(one, 0)
    log.touch(two)
    changes = log.drain()
    assert changes.added == (two,)
    assert changes.touched == (two, one)


def test_taking_forgets() -> None:
    log = ChangeLog(MoveLog())
    log.add(make_request(1))
    log.event(Event(kind="note", time_ns=1))
    first = log.drain()
    assert first
    assert not log.drain()
    assert len(first.events) == len(first.added) == 1


def test_events_are_bounded_and_the_oldest_go() -> None:
    log = ChangeLog(MoveLog())
    for time_ns in range(MAX_EVENTS + 5):
        log.event(Event(kind="note", time_ns=time_ns))
    events = log.take_events()
    assert len(events) == MAX_EVENTS
    assert events[0].time_ns == 5

"""The record of changes between two frames."""

from __future__ import annotations

from kvscope_engine.policy.kv_cache.move_log import MoveLog
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.change_log import MAX_EVENTS, ChangeLog
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Event


def make_request(number: int) -> Request:
    return Request(number, f"r{number}", [1], ResolvedSampling(), 1, 0)


def test_block_table_is_reported_from_its_first_changed_entry() -> None:
    log, request = ChangeLog(MoveLog()), make_request(1)
    for unchanged in (5, 3, 7):
        log.record_table(request, unchanged)
    assert log.drain().tables == {1: 3}


def test_each_request_is_reported_once_in_order_of_its_first_change() -> None:
    log, one, two = ChangeLog(MoveLog()), make_request(1), make_request(2)
    log.add_request(two)
    log.record_table(one, 0)
    log.touch(two)
    changes = log.drain()
    assert changes.added == (two,)
    assert changes.touched == (two, one)


def test_changed_requests_are_reported_once() -> None:
    log = ChangeLog(MoveLog())
    log.add_request(make_request(1))
    log.record_event(Event(kind="note", time_ns=1))
    first = log.drain()
    assert first
    assert not log.drain()
    assert len(first.events) == len(first.added) == 1


def test_oldest_events_are_dropped_if_too_many_wait_for_the_next_frame() -> None:
    log = ChangeLog(MoveLog())
    for time_ns in range(MAX_EVENTS + 5):
        log.record_event(Event(kind="note", time_ns=time_ns))
    events = log.drain_events()
    assert len(events) == MAX_EVENTS
    assert events[0].time_ns == 5

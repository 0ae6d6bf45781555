"""Tests of the work that a window does while nothing happens; counts calls instead of measuring time."""

from __future__ import annotations

import time
from types import SimpleNamespace

from PySide6.QtCore import QTimer
from tests.app import window_driver as driver

from kvscope_app.session import poll_timer
from kvscope_app.session import session as session_module
from kvscope_app.session.poll_timer import IDLE_MS, WAITING_MS
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.telemetry import Counters

BEHIND = ("timeline", "heatmap", "events")
MIN_IDLE_INTERVAL_MS = 250
"""Shortest interval in ms of any timer in an idle window."""


def record_refreshes(view, monkeypatch):
    """Record calls of `view.refresh`; the returned list grows with each."""
    calls = []
    refresh = view.refresh
    monkeypatch.setattr(view, "refresh", lambda: (calls.append(1), refresh()))
    return calls


def test_views_behind_another_tab_are_not_refreshed_until_raised(
    engine, session, make_window, poll, qtbot, monkeypatch
):
    window = make_window(session, with_views=("requests", *BEHIND), size=(1500, 900))
    window.docks["requests"].raise_()
    qtbot.waitUntil(lambda: not any(is_on_screen(window.views[name]) for name in BEHIND), timeout=30_000)
    assert all(window.views[name].isVisible() for name in BEHIND), "Qt reports views behind tabs as visible"
    behind = {name: record_refreshes(window.views[name], monkeypatch) for name in BEHIND}
    in_front = record_refreshes(window.page_map, monkeypatch)
    for _ in range(5):
        engine.frame([1])
        poll(session)
        session.overview_changed.emit()
        before = len(in_front)
        qtbot.waitUntil(lambda before=before: len(in_front) > before, timeout=30_000)
    assert not any(behind.values())
    for name in BEHIND:
        window.docks[name].raise_()
        qtbot.waitUntil(lambda name=name: len(behind[name]) > 0, timeout=30_000)


def test_views_of_a_minimised_window_are_not_refreshed(engine, session, make_window, poll, qtbot, monkeypatch):
    window = make_window(session)
    calls = record_refreshes(window.page_map, monkeypatch)
    window.showMinimized()
    qtbot.waitUntil(lambda: driver.has_no_running_timer(window.refresher))
    calls.clear()
    for _ in range(3):
        engine.frame([1])
        poll(session)
        window.refresher.run()
    assert not calls
    window.showNormal()
    qtbot.waitUntil(lambda: len(calls) > 0, timeout=30_000)


def test_timers_of_an_idle_window_have_long_intervals(engine, session, make_window, qtbot):
    window = make_window(session, with_views=True, size=(1500, 900))
    session.start()

    def often():
        timers = {*window.findChildren(QTimer), *session.findChildren(QTimer)}
        return [timer for timer in timers if timer.isActive() and timer.interval() < MIN_IDLE_INTERVAL_MS]

    qtbot.waitUntil(lambda: not often(), timeout=60_000)


def test_status_changed_is_emitted_once_a_second_while_idle(engine, session, poll, monkeypatch):
    now_ns = [time.monotonic_ns()]
    for module in (poll_timer, session_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    received = []
    session.status_changed.connect(lambda: received.append(now_ns[0]))

    def num_emitted(seconds, beat=lambda: None):
        received.clear()
        for _ in range(seconds * 10):
            now_ns[0] += 100_000_000
            beat()
            poll(session)
        return len(received)

    num_emitted(3)  # let the session become idle
    assert num_emitted(10, engine.heartbeat) == 10
    assert num_emitted(10, lambda: engine.frame([1])) > 30
    num_emitted(3)
    engine.source.status = engine.source.status.__class__(engine.source.status.state, "for a reason that is new")
    assert num_emitted(1) >= 1
    assert session.status.reason == "for a reason that is new"


def test_polling_is_faster_while_requests_are_running(engine, session, poll, monkeypatch):
    now_ns = [time.monotonic_ns()]
    for module in (poll_timer, session_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))

    def interval_after(running):
        engine.frame([1], counters=Counters(num_running=running))
        poll(session)
        now_ns[0] += 2_000_000_000
        engine.heartbeat()
        poll(session)
        return session.poll_timer.interval()

    assert interval_after(1) == WAITING_MS
    assert interval_after(0) == IDLE_MS


def test_lag_behind_the_live_engine_is_updated_once_per_second_if_it_is_long(engine, session, make_window, monkeypatch):
    window = make_window(session)
    corner = window.menuBar().cornerWidget()
    session.timeline.pause()
    behind_s = [3.0]
    monkeypatch.setattr(type(session.timeline), "behind_seconds", property(lambda _: behind_s[0]))
    corner.refresh()
    (clock,) = corner.findChildren(QTimer)
    assert clock.interval() <= 100
    behind_s[0] = 30.0
    corner.refresh()
    assert clock.interval() == 1000
    assert "30.0 s behind" in driver.current_view_text(window)
    behind_s[0] = 1.0
    corner.refresh()
    assert clock.interval() <= 100


def test_usage_bar_is_not_updated_if_block_counts_are_unchanged(engine, session, make_window, poll, monkeypatch):
    window = make_window(session)
    window.page_map._refresh_slowly()
    received = []
    monkeypatch.setattr(window.page_map.usage, "show_counts", lambda *counts: received.append(counts))
    for _ in range(5):
        window.page_map._refresh_slowly()
    assert not received
    engine.write_blocks([3])
    poll(session)
    window.page_map._refresh_slowly()
    assert received


def test_overview_is_extended_less_often_while_idle(engine, session, poll, monkeypatch):
    """Each extension redraws what shows the overview; while requests run, alarms need each second."""
    now_ns = [time.monotonic_ns()]
    for module in (poll_timer, session_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    taken = []
    ring = SimpleNamespace(start_ns=None)
    kept = SimpleNamespace(
        drain_into=lambda overview: taken.append(now_ns[0]), ring=ring, recorder=None, failure="", close=lambda: None
    )
    monkeypatch.setattr(session, "disk_history", kept)

    def num_extended(seconds):
        taken.clear()
        for _ in range(seconds * 4):
            now_ns[0] += 250_000_000
            engine.heartbeat()
            poll(session)
        return len(taken)

    engine.frame([1], counters=Counters(num_running=1))
    poll(session)
    num_extended(12)
    assert num_extended(12) == 12, "a request is running"
    engine.frame([1], counters=Counters())
    poll(session)
    assert num_extended(8) >= 8, "the last busy seconds are still missing"
    num_extended(4)
    assert num_extended(12) == 3

"""What a window does while nothing happens: work is counted, not time."""

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
CALM_MS = 250
"""No timer of a window at rest fires more often."""


def counted(view, monkeypatch):
    """Calls of its `refresh`, as they come."""
    calls = []
    refresh = view.refresh
    monkeypatch.setattr(view, "refresh", lambda: (calls.append(1), refresh()))
    return calls


def test_views_behind_another_tab_do_nothing_until_they_are_raised(
    engine, session, make_window, poll, qtbot, monkeypatch
):
    window = make_window(session, with_views=("requests", *BEHIND), size=(1500, 900))
    window.docks["requests"].raise_()
    qtbot.waitUntil(lambda: not any(is_on_screen(window.views[name]) for name in BEHIND), timeout=30_000)
    assert all(window.views[name].isVisible() for name in BEHIND), "Qt calls them visible"
    behind = {name: counted(window.views[name], monkeypatch) for name in BEHIND}
    in_front = counted(window.page_map, monkeypatch)
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


def test_no_view_of_a_minimised_window_is_refreshed(engine, session, make_window, poll, qtbot, monkeypatch):
    window = make_window(session)
    calls = counted(window.page_map, monkeypatch)
    window.showMinimized()
    qtbot.waitUntil(lambda: driver.is_at_rest(window.refresher))
    calls.clear()
    for _ in range(3):
        engine.frame([1])
        poll(session)
        window.refresher.run()
    assert not calls
    window.showNormal()
    qtbot.waitUntil(lambda: len(calls) > 0, timeout=30_000)


def test_no_timer_of_a_window_at_rest_fires_often(engine, session, make_window, qtbot):
    window = make_window(session, with_views=True, size=(1500, 900))
    session.start()

    def often():
        timers = {*window.findChildren(QTimer), *session.findChildren(QTimer)}
        return [timer for timer in timers if timer.isActive() and timer.interval() < CALM_MS]

    qtbot.waitUntil(lambda: not often(), timeout=60_000)


def test_at_rest_it_is_told_once_a_second_how_things_stand(engine, session, poll, monkeypatch):
    now_ns = [time.monotonic_ns()]
    for module in (poll_timer, session_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    received = []
    session.status_changed.connect(lambda: received.append(now_ns[0]))

    def told_in(seconds, beat=lambda: None):
        received.clear()
        for _ in range(seconds * 10):
            now_ns[0] += 100_000_000
            beat()
            poll(session)
        return len(received)

    told_in(3)  # it comes to rest
    assert told_in(10, engine.heartbeat) == 10
    assert told_in(10, lambda: engine.frame([1])) > 30
    told_in(3)
    engine.source.status = engine.source.status.__class__(engine.source.status.state, "for a reason that is new")
    assert told_in(1) >= 1
    assert session.status.reason == "for a reason that is new"


def test_while_requests_are_under_way_it_looks_more_often(engine, session, poll, monkeypatch):
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


def test_the_time_behind_moves_on_each_second_once_nobody_reads_tenths(engine, session, make_window, monkeypatch):
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
    assert "30.0 s behind" in driver.moment_shown(window)
    behind_s[0] = 1.0
    corner.refresh()
    assert clock.interval() <= 100


def test_words_that_did_not_change_are_not_told_again(engine, session, make_window, poll, monkeypatch):
    window = make_window(session)
    window.page_map._refresh_slowly()
    received = []
    monkeypatch.setattr(window.page_map.usage, "show_counts", lambda *counts: received.append(counts))
    for _ in range(5):
        window.page_map._refresh_slowly()
    assert not received
    engine.hold([3])
    poll(session)
    window.page_map._refresh_slowly()
    assert received


def test_at_rest_the_overview_goes_on_seldom(engine, session, poll, monkeypatch):
    """What shows it draws all of it anew; while requests are under way alarms look at each second of it."""
    now_ns = [time.monotonic_ns()]
    for module in (poll_timer, session_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    taken = []
    ring = SimpleNamespace(start_ns=None)
    kept = SimpleNamespace(
        drain_into=lambda overview: taken.append(now_ns[0]), ring=ring, recorder=None, failure="", close=lambda: None
    )
    monkeypatch.setattr(session, "disk_history", kept)

    def taken_in(seconds):
        taken.clear()
        for _ in range(seconds * 4):
            now_ns[0] += 250_000_000
            engine.heartbeat()
            poll(session)
        return len(taken)

    engine.frame([1], counters=Counters(num_running=1))
    poll(session)
    taken_in(12)
    assert taken_in(12) == 12, "a request is under way"
    engine.frame([1], counters=Counters())
    poll(session)
    assert taken_in(8) >= 8, "the last busy seconds are still to come"
    taken_in(4)
    assert taken_in(12) == 3

"""Tests of the order and rate in which views are refreshed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from PySide6.QtWidgets import QVBoxLayout, QWidget
from tests.app import window_driver as driver

from kvscope_app.views import refresher as refresher_module
from kvscope_app.views.base import View
from kvscope_app.views.refresher import Refresher


class CountingView(View):
    title = "Counting"
    object_name = "counting"

    def __init__(self, session, parent, hz):
        super().__init__(session, parent)
        self.refresh_hz = hz
        self.count = 0

    def refresh(self):
        self.count += 1


@pytest.fixture
def host_refresher_views(session, qtbot):
    host = QWidget()
    qtbot.addWidget(host)
    column = QVBoxLayout(host)
    refresher = Refresher(session, host)
    views = [CountingView(session, host, hz) for hz in (60.0, 5.0, 5.0)]
    for view in views:
        column.addWidget(view)
        refresher.add_view(view)
    host.show()
    return host, refresher, views


@pytest.fixture
def clock_ns(monkeypatch):
    """Replace the refresher's clock by one that the test moves."""
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(refresher_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    return now_ns


def test_slow_views_are_refreshed_in_turn(host_refresher_views, clock_ns, engine, session, poll):
    _, refresher, (fast, one, two) = host_refresher_views
    refresh_all(clock_ns, refresher)
    assert (one.count, two.count) in ((1, 0), (0, 1))
    refresher.run()
    assert (one.count, two.count) == (1, 1)
    assert fast.count >= 1


def test_each_run_refreshes_the_fast_view_or_one_slow_view(host_refresher_views, clock_ns):
    """`touch_all` refreshes the fast view immediately; the others follow, one per run."""
    _, refresher, views = host_refresher_views
    advance(clock_ns, 1000)
    for view in views:
        view.count = 0
    refresher.touch_all()
    assert [view.count for view in views] == [1, 0, 0]
    for _ in range(2):
        before = [view.count for view in views]
        refresher.run()
        assert sum(view.count for view in views) == sum(before) + 1
    assert [view.count for view in views] == [1, 1, 1]


def test_fast_view_comes_before_a_slow_one_that_waited_less(host_refresher_views, clock_ns):
    _, refresher, (fast, one, two) = host_refresher_views
    refresh_all(clock_ns, refresher)
    refresher.run()
    advance(clock_ns, 150)
    refresher.touch(fast)
    refresher.run()
    advance(clock_ns, 60)
    for view in (fast, one, two):
        refresher.touch(view)
    refresher.run()
    assert (fast.count, one.count + two.count) == (2, 3)
    refresher.run()
    refresher.run()
    assert (fast.count, one.count, two.count) == (3, 2, 2)


def test_view_is_refreshed_at_its_own_rate(host_refresher_views, clock_ns, engine, session, poll):
    _, refresher, (_, one, two) = host_refresher_views
    refresh_all(clock_ns, refresher)
    refresher.run()
    for _ in range(5):
        engine.frame()
        poll(session)
        refresher.run()
    assert (one.count, two.count) == (1, 1)
    advance(clock_ns, 200)
    refresher.run()
    refresher.run()
    assert (one.count, two.count) == (2, 2)


def test_update_that_arrives_soon_after_a_late_update_is_drawn_separately(
    host_refresher_views, clock_ns, session, qtbot
):
    _, refresher, (fast, *_) = host_refresher_views
    refresh_all(clock_ns, refresher)
    for milliseconds in (24, 8, 16):  # one is half a frame late
        advance(clock_ns, milliseconds)
        before = fast.count
        session.timeline.shown.emit(None)
        qtbot.waitUntil(lambda before=before: fast.count == before + 1, timeout=120_000)


def test_waiting_view_is_refreshed_eventually(host_refresher_views, engine, session, poll, qtbot):
    _, refresher, (_, one, two) = host_refresher_views
    refresher.touch_all()
    for _ in range(3):
        engine.frame()
        poll(session)
    qtbot.waitUntil(lambda: one.count and two.count, timeout=120_000)


def test_slow_view_is_postponed_once_after_an_update(host_refresher_views, clock_ns, session):
    _, refresher, (_, one, two) = host_refresher_views
    refresh_all(clock_ns, refresher)
    advance(clock_ns, 1000)
    before = one.count + two.count
    session.timeline.shown.emit(None)
    refresher.run()
    assert one.count + two.count == before
    session.timeline.shown.emit(None)
    refresher.run()
    assert one.count + two.count == before + 1, "otherwise a view could be postponed for ever"


def test_single_frame_is_shown_together_with_the_page_map(host_refresher_views, clock_ns, engine, session, poll, qtbot):
    """A heartbeat just before the frame must not keep such a view one frame behind the map."""
    host, refresher, (fast, other, _) = host_refresher_views
    counted = CountingView(session, host, 5.0)
    counted.follows_page_map = True
    host.layout().addWidget(counted)
    refresher.add_view(counted)
    shown = {}
    for view in (fast, counted):
        view.refresh = lambda view=view: shown.update({view: session.mirror.seq})
    refresh_all(clock_ns, refresher)
    for _ in range(4):
        advance(clock_ns, 250)
        engine.heartbeat()
        poll(session)
        for _ in range(3):
            advance(clock_ns, 20)
            refresher.run()
        advance(clock_ns, 20)
        engine.frame()
        poll(session)
        qtbot.waitUntil(lambda: shown[fast] == session.mirror.seq, timeout=120_000)
        assert shown[counted] == shown[fast]
    before = other.count
    for _ in range(10):
        advance(clock_ns, 16)
        engine.frame()
        poll(session)
        qtbot.waitUntil(lambda: shown[fast] == session.mirror.seq, timeout=120_000)
    assert shown[counted] < shown[fast], "fast frames are shown at the view's own rate"
    assert other.count <= before + 1


def test_expensive_slow_views_are_postponed_so_that_the_fast_view_keeps_refreshing(host_refresher_views, clock_ns):
    """After a refresh of 40 ms, the next slow view follows 120 ms later, not earlier."""
    _, refresher, (fast, one, two) = host_refresher_views
    for view in (one, two):
        view.refresh = lambda view=view: (setattr(view, "count", view.count + 1), advance(clock_ns, 40))
    refresh_all(clock_ns, refresher)
    assert (fast.count, one.count + two.count) == (1, 1)
    for turn, past_ms in enumerate((30, 30, 59), 2):
        advance(clock_ns, past_ms)
        refresher.touch(fast)
        refresher.run()
        assert (fast.count, one.count + two.count) == (turn, 1)
    advance(clock_ns, 1)
    refresher.run()
    assert (one.count, two.count) == (1, 1)


def refresh_all(clock_ns, refresher):
    """Make all views due and run the refresher."""
    advance(clock_ns, 1000)
    for view in refresher.parent().findChildren(CountingView):
        view.count = 0
    refresher.touch_all()
    refresher.run()


def advance(clock_ns, milliseconds):
    """Advance the clock."""
    clock_ns[0] += milliseconds * 1_000_000


def test_hidden_view_is_not_refreshed_until_shown(host_refresher_views, engine, session, poll, qtbot):
    _, refresher, views = host_refresher_views
    views[0].hide()
    before = views[0].count
    refresher.touch_all()
    assert views[0].count == before
    views[0].show()
    refresher.touch(views[0])
    qtbot.waitUntil(lambda: views[0].count == before + 1, timeout=120_000)


def test_paused_views_are_refreshed_only_for_a_selection(host_refresher_views, engine, session, poll, qtbot):
    _, refresher, (fast, _, _) = host_refresher_views
    session.timeline.pause()
    qtbot.waitUntil(lambda: driver.has_no_running_timer(refresher), timeout=120_000)
    before = fast.count
    engine.frame()
    poll(session)
    assert fast.count == before
    session.selection.select_request(1)
    qtbot.waitUntil(lambda: fast.count == before + 1, timeout=120_000)


def test_heartbeats_alone_cause_few_refreshes(host_refresher_views, clock_ns, engine, session, poll):
    """Curves settle within seconds; after that, an idle engine causes one refresh per three seconds."""
    _, refresher, views = host_refresher_views
    refresh_all(clock_ns, refresher)

    def is_followed(beat):
        """Let half a second pass. Returns whether all views were refreshed."""
        before = sum(view.count for view in views)
        advance(clock_ns, 440)
        beat()
        poll(session)
        for _ in range(3):
            advance(clock_ns, 20)
            refresher.run()
        refreshed = sum(view.count for view in views) - before
        assert refreshed in (0, len(views))
        return refreshed > 0

    assert is_followed(engine.frame)
    assert all(is_followed(engine.heartbeat) for _ in range(15)), "the curves are still moving"
    assert 4 <= sum(is_followed(engine.heartbeat) for _ in range(30)) <= 6
    assert sum(is_followed(engine.memory) for _ in range(6)) == 1
    assert is_followed(engine.frame)
    assert is_followed(engine.heartbeat)

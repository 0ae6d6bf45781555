"""Who is refreshed when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from PySide6.QtWidgets import QVBoxLayout, QWidget
from tests.app import window_driver as driver

from kvscope_app.views import refresher as refresher_module
from kvscope_app.views.base import View
from kvscope_app.views.refresher import Refresher


class Counting(View):
    title = "Counting"
    object_name = "counting"

    def __init__(self, session, parent, hz):
        super().__init__(session, parent)
        self.refresh_hz = hz
        self.count = 0

    def refresh(self):
        self.count += 1


@pytest.fixture
def setup(session, qtbot):
    host = QWidget()
    qtbot.addWidget(host)
    column = QVBoxLayout(host)
    refresher = Refresher(session, host)
    views = [Counting(session, host, hz) for hz in (60.0, 5.0, 5.0)]
    for view in views:
        column.addWidget(view)
        refresher.add_view(view)
    host.show()
    return host, refresher, views


@pytest.fixture
def clock(monkeypatch):
    """The refresher's, which stands still until a test moves it."""
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(refresher_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    return now_ns


def test_slow_views_take_turns(setup, clock, engine, session, poll):
    _, refresher, (fast, one, two) = setup
    begin_anew(clock, refresher)
    assert (one.count, two.count) in ((1, 0), (0, 1))
    refresher.run()
    assert (one.count, two.count) == (1, 1)
    assert fast.count >= 1


def test_a_turn_is_of_the_fast_view_or_of_one_of_the_others(setup, clock):
    """Who is told that all may have changed shows the fast one at once; the others follow, one a turn."""
    _, refresher, views = setup
    add(clock, 1000)
    for view in views:
        view.count = 0
    refresher.touch_all()
    assert [view.count for view in views] == [1, 0, 0]
    for _ in range(2):
        before = [view.count for view in views]
        refresher.run()
        assert sum(view.count for view in views) == sum(before) + 1
    assert [view.count for view in views] == [1, 1, 1]


def test_the_fast_view_comes_before_a_slow_one_that_waited_less(setup, clock):
    _, refresher, (fast, one, two) = setup
    begin_anew(clock, refresher)
    refresher.run()
    add(clock, 150)
    refresher.touch(fast)
    refresher.run()
    add(clock, 60)
    for view in (fast, one, two):
        refresher.touch(view)
    refresher.run()
    assert (fast.count, one.count + two.count) == (2, 3)
    refresher.run()
    refresher.run()
    assert (fast.count, one.count, two.count) == (3, 2, 2)


def test_a_view_is_refreshed_at_its_own_rate(setup, clock, engine, session, poll):
    _, refresher, (_, one, two) = setup
    begin_anew(clock, refresher)
    refresher.run()
    for _ in range(5):
        engine.frame()
        poll(session)
        refresher.run()
    assert (one.count, two.count) == (1, 1)
    add(clock, 200)
    refresher.run()
    refresher.run()
    assert (one.count, two.count) == (2, 2)


def test_an_update_soon_after_a_late_one_has_a_frame_of_its_own(setup, clock, session, qtbot):
    _, refresher, (fast, *_) = setup
    begin_anew(clock, refresher)
    for milliseconds in (24, 8, 16):  # one is late by half a frame
        add(clock, milliseconds)
        before = fast.count
        session.timeline.shown.emit(None)
        qtbot.waitUntil(lambda before=before: fast.count == before + 1, timeout=120_000)


def test_who_waits_for_its_turn_is_come_back_to(setup, engine, session, poll, qtbot):
    _, refresher, (_, one, two) = setup
    refresher.touch_all()
    for _ in range(3):
        engine.frame()
        poll(session)
    qtbot.waitUntil(lambda: one.count and two.count, timeout=120_000)


def test_a_turn_right_after_an_update_is_put_off_once(setup, clock, session):
    _, refresher, (_, one, two) = setup
    begin_anew(clock, refresher)
    add(clock, 1000)
    before = one.count + two.count
    session.timeline.shown.emit(None)
    refresher.run()
    assert one.count + two.count == before
    session.timeline.shown.emit(None)
    refresher.run()
    assert one.count + two.count == before + 1, "who is late all the time would wait for ever"


def test_a_frame_that_comes_alone_is_shown_in_step(setup, clock, engine, session, poll, qtbot):
    """A sign of life just before it does not keep a view in step with the map a frame behind."""
    host, refresher, (fast, other, _) = setup
    counted = Counting(session, host, 5.0)
    counted.in_step = True
    host.layout().addWidget(counted)
    refresher.add_view(counted)
    shown = {}
    for view in (fast, counted):
        view.refresh = lambda view=view: shown.update({view: session.mirror.seq})
    begin_anew(clock, refresher)
    for _ in range(4):
        add(clock, 250)
        engine.heartbeat()
        poll(session)
        for _ in range(3):
            add(clock, 20)
            refresher.run()
        add(clock, 20)
        engine.frame()
        poll(session)
        qtbot.waitUntil(lambda: shown[fast] == session.mirror.seq, timeout=120_000)
        assert shown[counted] == shown[fast]
    before = other.count
    for _ in range(10):
        add(clock, 16)
        engine.frame()
        poll(session)
        qtbot.waitUntil(lambda: shown[fast] == session.mirror.seq, timeout=120_000)
    assert shown[counted] < shown[fast], "frames that come fast are shown at the view's own rate"
    assert other.count <= before + 1


def test_slow_views_that_take_long_leave_the_time_to_the_fast_one(setup, clock):
    """One that took 40 ms is followed by the next 120 ms later, and not before."""
    _, refresher, (fast, one, two) = setup
    for view in (one, two):
        view.refresh = lambda view=view: (setattr(view, "count", view.count + 1), add(clock, 40))
    begin_anew(clock, refresher)
    assert (fast.count, one.count + two.count) == (1, 1)
    for turn, past_ms in enumerate((30, 30, 59), 2):
        add(clock, past_ms)
        refresher.touch(fast)
        refresher.run()
        assert (fast.count, one.count + two.count) == (turn, 1)
    add(clock, 1)
    refresher.run()
    assert (one.count, two.count) == (1, 1)


def begin_anew(clock, refresher):
    """All views are due, whatever was before the test's first line."""
    add(clock, 1000)
    for view in refresher.parent().findChildren(Counting):
        view.count = 0
    refresher.touch_all()
    refresher.run()


def add(clock, milliseconds):
    """Let the time go by."""
    clock[0] += milliseconds * 1_000_000


def test_hidden_views_wait(setup, engine, session, poll, qtbot):
    _, refresher, views = setup
    views[0].hide()
    before = views[0].count
    refresher.touch_all()
    assert views[0].count == before
    views[0].show()
    refresher.touch(views[0])
    qtbot.waitUntil(lambda: views[0].count == before + 1, timeout=120_000)


def test_paused_nothing_is_refreshed_but_a_selection(setup, engine, session, poll, qtbot):
    _, refresher, (fast, _, _) = setup
    session.timeline.pause()
    qtbot.waitUntil(lambda: driver.is_at_rest(refresher), timeout=120_000)
    before = fast.count
    engine.frame()
    poll(session)
    assert fast.count == before
    session.selection.select_request(1)
    qtbot.waitUntil(lambda: fast.count == before + 1, timeout=120_000)


def test_signs_of_life_alone_are_followed_at_leisure(setup, clock, engine, session, poll):
    """Curves come to rest in seconds; from then on an engine that idles costs a refresh every three seconds."""
    _, refresher, views = setup
    begin_anew(clock, refresher)

    def is_followed(beat):
        """Half a second goes by, in which each view has its turn if anything is to be shown."""
        before = sum(view.count for view in views)
        add(clock, 440)
        beat()
        poll(session)
        for _ in range(3):
            add(clock, 20)
            refresher.run()
        refreshed = sum(view.count for view in views) - before
        assert refreshed in (0, len(views))
        return refreshed > 0

    assert is_followed(engine.frame)
    assert all(is_followed(engine.heartbeat) for _ in range(15)), "the curves still move"
    assert 4 <= sum(is_followed(engine.heartbeat) for _ in range(30)) <= 6
    assert sum(is_followed(engine.memory) for _ in range(6)) == 1
    assert is_followed(engine.frame)
    assert is_followed(engine.heartbeat)

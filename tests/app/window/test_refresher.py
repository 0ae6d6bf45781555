"""Who is refreshed when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from PySide6.QtWidgets import QVBoxLayout, QWidget

from kvscope_app.views.base import View
from kvscope_app.window import refresher as refresher_module
from kvscope_app.window.refresher import Refresher


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
        refresher.add(view)
    host.show()
    return host, refresher, views


def test_slow_views_take_turns(setup, engine, session, poll):
    _, refresher, (fast, one, two) = setup
    refresher.touch_all()
    assert (one.count, two.count) in ((1, 0), (0, 1))
    refresher.run()
    assert (one.count, two.count) == (1, 1)
    assert fast.count >= 1


def test_a_view_is_refreshed_at_its_own_rate(setup, engine, session, poll, qtbot):
    _, refresher, (_, one, two) = setup
    refresher.touch_all()
    refresher.run()
    for _ in range(5):
        engine.frame()
        poll(session)
    assert (one.count, two.count) == (1, 1)
    qtbot.waitUntil(lambda: one.count >= 2 and two.count >= 2, timeout=120_000)


def test_hidden_views_wait(setup, engine, session, poll, qtbot):
    _, refresher, views = setup
    views[0].hide()
    refresher.touch_all()
    assert views[0].count == 0
    views[0].show()
    refresher.touch(views[0])
    qtbot.waitUntil(lambda: views[0].count == 1, timeout=120_000)


def test_paused_nothing_is_refreshed_but_a_selection(setup, engine, session, poll, qtbot):
    _, refresher, (fast, _, _) = setup
    session.set_paused(True)
    qtbot.waitUntil(lambda: not refresher._later.isActive(), timeout=120_000)
    before = fast.count
    engine.frame()
    poll(session)
    assert fast.count == before
    session.select_request(1)
    qtbot.waitUntil(lambda: fast.count == before + 1, timeout=120_000)


def test_signs_of_life_alone_are_followed_at_leisure(setup, engine, session, poll, monkeypatch):
    """Curves come to rest in seconds; from then on an engine that idles costs a refresh every two seconds."""
    _, refresher, _ = setup
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(refresher_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))

    def is_followed(beat):
        now_ns[0] += 500_000_000
        refresher._dirty.clear()
        beat()
        poll(session)
        return bool(refresher._dirty)

    assert is_followed(engine.frame)
    assert all(is_followed(engine.heartbeat) for _ in range(15)), "the curves still move"
    assert 4 <= sum(is_followed(engine.heartbeat) for _ in range(20)) <= 6
    assert sum(is_followed(engine.memory) for _ in range(4)) == 1
    assert is_followed(engine.frame)
    assert is_followed(engine.heartbeat)

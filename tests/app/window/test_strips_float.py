"""Banners, alarms and the bar of a held engine float over the map: nothing in it moves when one appears or goes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QRect
from PySide6.QtWidgets import QApplication, QPushButton

from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import DEFAULT_RULES

LONG = "No block was free for a request that waits, and nothing could be given up for it. " * 4


@pytest.fixture(params=[(1280, 800), (880, 620)], ids=["wide", "small"])
def window(request, engine, session, make_window, poll, qtbot):
    engine.hold([1, 2])
    poll(session)
    made = make_window(session, size=request.param)
    made.page_map.refresh()
    return made


def places(window):
    """Where the map, its cells and all around it are."""
    QApplication.processEvents()
    view = window.page_map
    parts = [view, view.canvas, window.playback, *view.findChildren(QPushButton)]
    cells = [view.canvas.cell_rect(block) for block in range(0, 64, 7)]
    return [part.geometry() for part in parts], cells, view.scene.grid.columns


def strips(window):
    alarm = Alarm(DEFAULT_RULES[0], epoch=7, begin_ns=1_700_000_000 * 10**9, rang_ns=1_700_000_001 * 10**9, worst=1.0)
    yield "banner", lambda: window.banner.tell("The engine ended", LONG, (("Restart", print), ("Show log", print)))
    yield "alarm_strip", lambda: window.alarms.rang.emit(alarm)
    yield "paused_bar", lambda: window.paused_bar.show()


def test_nothing_in_the_map_moves_when_a_strip_appears_or_goes(window):
    before = places(window)
    shown = []
    for name, show in strips(window):
        show()
        shown.append(getattr(window, name))
        assert places(window) == before, name
        assert all(strip.isVisible() for strip in shown)
    for strip in shown:
        strip.hide()
        assert places(window) == before


def test_strips_lie_over_the_bottom_of_the_map_and_are_whole(window):
    for _, show in strips(window):
        show()
        QApplication.processEvents()
    area = window.page_map.parentWidget()
    canvas = window.page_map.canvas
    below = canvas.mapTo(area, canvas.rect().bottomLeft()).y() + 1
    boxes = []
    for name, _ in strips(window):
        strip = getattr(window, name)
        box = QRect(strip.mapTo(area, strip.rect().topLeft()), strip.size())
        assert area.rect().contains(box), name
        assert strip.height() >= strip.heightForWidth(strip.width()), "nothing in it is cut"
        boxes.append(box)
    assert max(box.bottom() for box in boxes) <= below, "legend and buttons of the map stay free"
    assert not any(one.intersects(other) for one in boxes for other in boxes if one is not other)


def test_before_there_is_a_map_they_float_as_well(session, make_window):
    window = make_window(session)
    window.banner.tell("The engine stopped before it was ready")
    QApplication.processEvents()
    assert window.banner.visibleRegion().boundingRect().height() == window.banner.height()

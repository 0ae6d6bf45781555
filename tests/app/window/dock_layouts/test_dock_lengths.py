"""Tests that docks squeezed by a small window return to their widths when it grows, even after a restart."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver

LARGE, SMALL = (1560, 960), (900, 600)
SIDES = ("console", "throughput")


@pytest.fixture
def open_window(engine, session, make_window, poll):
    engine.write_blocks([1, 2])
    poll(session)
    return lambda size=LARGE: make_window(session, with_views=True, size=size)


def dock_widths(window):
    return {name: window.docks[name].width() for name in SIDES}


def resize(window, qtbot, size):
    window.resize(*size)
    QApplication.processEvents()
    qtbot.wait(10)


def test_dock_widths_return_when_the_window_grows(open_window, qtbot):
    window = open_window()
    before = dock_widths(window)
    resize(window, qtbot, SMALL)
    squeezed = dock_widths(window)
    assert all(squeezed[name] < before[name] for name in SIDES)
    resize(window, qtbot, (1000, 700))
    resize(window, qtbot, LARGE)
    assert dock_widths(window) == before


def test_dock_widths_return_in_a_window_that_was_closed_while_small(open_window, qtbot):
    window = open_window()
    before = dock_widths(window)
    resize(window, qtbot, SMALL)
    window.close()
    again = open_window(SMALL)
    assert again.width() < LARGE[0]
    resize(again, qtbot, LARGE)
    assert dock_widths(again) == before


def test_dock_edge_moved_by_the_user_keeps_its_position(open_window, qtbot):
    window = open_window()
    before = dock_widths(window)
    resize(window, qtbot, (1100, 700))

    driver.move_dock_edge(window, "console", 280)
    qtbot.wait(10)
    assert window.docks["console"].width() == 280
    resize(window, qtbot, SMALL)
    resize(window, qtbot, LARGE)
    assert dock_widths(window) == before | {"console": 280}


def test_default_layout_resets_the_dock_widths(open_window, qtbot):
    window = open_window()
    before = dock_widths(window)
    window.resizeDocks([window.docks["console"]], [before["console"] + 150], Qt.Orientation.Horizontal)
    QApplication.processEvents()
    window.actions_by_name["reset_layout"].trigger()
    qtbot.wait(300)
    resize(window, qtbot, SMALL)
    resize(window, qtbot, LARGE)
    assert dock_widths(window) == before

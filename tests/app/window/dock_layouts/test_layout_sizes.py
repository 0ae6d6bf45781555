"""Tests that zooming and resetting the layout do not change the size of a window and its docks permanently."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver


@pytest.fixture
def window(engine, session, make_window, poll, qtbot, themes):
    engine.write_blocks([1, 2])
    poll(session)
    yield make_window(session, with_views=True, size=(1280, 800))
    themes.settings.change(zoom_percent=100)


def sizes(window):
    """Return the size of the window and of its visible docks."""
    seen = {name: dock.size().toTuple() for name, dock in window.docks.items() if not dock.visibleRegion().isEmpty()}
    return window.size().toTuple(), seen


def test_zooming_in_and_out_restores_all_sizes(window, qtbot, storm):
    before, steps = sizes(window), storm(2, 5)
    for name in ("larger",) * steps + ("smaller",) * steps:
        window.actions_by_name[name].trigger()
        qtbot.wait(80)
    qtbot.waitUntil(lambda: sizes(window) == before)
    for name in ("larger",) * steps + ("usual_size",):
        window.actions_by_name[name].trigger()  # in immediate succession
    qtbot.waitUntil(lambda: sizes(window) == before)


def test_window_resized_between_two_zoom_steps_keeps_its_size(window, qtbot):
    window.actions_by_name["larger"].trigger()
    qtbot.wait(80)
    window.resize(1400, 820)
    QApplication.processEvents()
    window.actions_by_name["smaller"].trigger()
    qtbot.wait(80)
    assert window.size().toTuple() == (1400, 820)


def test_dock_edge_dragged_between_two_zoom_steps_keeps_its_position(window, qtbot):
    window.actions_by_name["larger"].trigger()
    qtbot.wait(80)
    driver.move_dock_edge(window, "console", 420)
    qtbot.wait(20)
    window.actions_by_name["smaller"].trigger()
    qtbot.wait(500)
    assert window.docks["console"].width() == 420


@pytest.mark.parametrize("size", [(1280, 800), (880, 620)])
def test_resetting_the_layout_keeps_the_window_size(window, qtbot, size):
    window.resize(*size)
    for dock in window.docks.values():
        dock.show()
    window.docks["timeline"].setFloating(True)
    QApplication.processEvents()
    window.resize(*size)
    QApplication.processEvents()
    had = window.size().toTuple()
    window.actions_by_name["reset_layout"].trigger()
    qtbot.wait(50)
    assert window.size().toTuple() == had
    assert not window.docks["timeline"].isFloating()
    assert window.docks["inspector"].isHidden()
    assert not window.docks["throughput"].visibleRegion().isEmpty()

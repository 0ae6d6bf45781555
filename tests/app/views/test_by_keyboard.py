"""Charts, timeline and heatmap by keyboard in the window: their keys are theirs while they have the focus, and seen."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

KEYS = Qt.Key


@pytest.fixture
def window(engine, session, make_window, poll, qtbot):
    for step in range(6):
        engine.hold([step])
        poll(session)
    made = make_window(session, with_views=("throughput", "timeline", "heatmap"), size=(1500, 900))
    made.activateWindow()
    qtbot.waitUntil(made.isActiveWindow)
    return made


def frame_is_seen(widget, window):
    """Whether the pixel in its corner is the accent's."""
    color = widget.grab().toImage().pixelColor(0, 0).name()
    return color == window.themes.theme.accent


def test_a_chart(window, qtbot, session):
    view = window.views["throughput"]
    window.focus_view("throughput")
    view.refresh_all()
    plot = view.panels["decode"].plot
    plot.setFocus()
    qtbot.waitUntil(plot.hasFocus)
    assert frame_is_seen(plot, window)
    pitch = window.page_map.scene.camera.pitch
    qtbot.keyClick(plot, KEYS.Key_Plus)
    assert window.page_map.scene.camera.pitch == pitch, "the map's zoom has the same key"
    first, last = view._fixed
    assert last - first == pytest.approx(30, abs=0.01)
    qtbot.keyClick(plot, KEYS.Key_Left)
    assert view._fixed == pytest.approx((first - 3, last - 3), abs=0.01)
    qtbot.keyClick(plot, KEYS.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert view._hover_s == pytest.approx(last - 3.3, abs=0.01)
    qtbot.keyClick(plot, KEYS.Key_Minus)
    assert view._fixed[1] - view._fixed[0] == pytest.approx(60, abs=0.01)
    qtbot.keyClick(plot, KEYS.Key_Home)
    assert not view.is_following
    assert not session.paused
    qtbot.keyClick(plot, KEYS.Key_End)
    assert view.is_following
    window.page_map.canvas.setFocus()
    assert not frame_is_seen(plot, window)


def test_the_timeline_keeps_its_keys(window, qtbot):
    canvas = window.views["timeline"].canvas
    window.focus_view("timeline")
    canvas.setFocus()
    qtbot.waitUntil(canvas.hasFocus)
    assert frame_is_seen(canvas, window)
    pitch = window.page_map.scene.camera.pitch
    for key in (KEYS.Key_Plus, KEYS.Key_Minus, KEYS.Key_Equal, KEYS.Key_Home, KEYS.Key_End, KEYS.Key_F):
        qtbot.keyClick(canvas, key)
    assert window.page_map.scene.camera.pitch == pitch


def test_the_heatmap_shows_its_focus(window, qtbot):
    canvas = window.views["heatmap"].map
    window.focus_view("heatmap")
    canvas.setFocus()
    qtbot.waitUntil(canvas.hasFocus)
    assert frame_is_seen(canvas, window)
    pitch = window.page_map.scene.camera.pitch
    for key in (KEYS.Key_Plus, KEYS.Key_Home, KEYS.Key_End, KEYS.Key_F):
        qtbot.keyClick(canvas, key)
    assert window.page_map.scene.camera.pitch == pitch

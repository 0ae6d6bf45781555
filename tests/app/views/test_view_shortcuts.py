"""Tests that each key has the same effect in all views."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from PySide6.QtCore import QKeyCombination, QPoint, Qt
from PySide6.QtGui import QColor, QKeySequence
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QLineEdit,
    QPlainTextEdit,
    QTextEdit,
    QWidget,
)

sys.path.insert(0, str(Path(__file__).parent))

from timed_fakes import START_NS, second

from kvscope_app.views.docks import DOCKS

KEYS = Qt.Key
EDITABLE_FIELDS = (QLineEdit, QPlainTextEdit, QTextEdit, QAbstractSpinBox)
"""Widgets that keep the keys for editing text, on every platform."""
PRESSES = {KEYS.Key_Space: (QAbstractButton, QComboBox), KEYS.Key_Home: (QComboBox,), KEYS.Key_End: (QComboBox,)}


with_time_views = pytest.mark.parametrize("window", [("timeline", "throughput", "heatmap")], indirect=True)
"""Load only these views."""


@pytest.fixture
def window(engine, session, make_window, poll, qtbot, request):
    for step in range(6):
        engine.request(step + 1, blocks=[step])
        engine.write_blocks([step], owner=step + 1)
        poll(session)
    engine.event(kind="preempted", number=1)
    poll(session)
    session.overview.extend([second(at, num_running=1, active_blocks=6, num_rows=64) for at in range(60)])
    session.bookmarks.add(START_NS)
    made = make_window(session, with_views=getattr(request, "param", True), size=(1500, 900))
    made.activateWindow()
    qtbot.waitUntil(made.isActiveWindow)
    return made


def focusable(view):
    """Return one focusable widget of each kind in a view, beginning with the view itself."""
    kinds = {}
    for widget in [view, *view.findChildren(QWidget)]:
        can = widget.focusPolicy() & Qt.FocusPolicy.StrongFocus and widget.isVisible() and widget.isEnabled()
        if can and not isinstance(widget, EDITABLE_FIELDS) and widget.focusProxy() is None:
            kinds.setdefault((type(widget), widget.accessibleName()), widget)
    return list(kinds.values())


def documented_shortcuts(actions):
    """Yield (action name, key sequence) of all shortcuts that apply wherever the focus is."""
    for spec in actions:
        if not spec.focus_dock and not spec.name.startswith("toggle_"):
            for sequence in actions[spec.name].shortcuts():
                yield spec.name, sequence


def press_keys(qtbot, widget, sequence):
    combination = sequence[0]
    assert isinstance(combination, QKeyCombination)
    qtbot.keyClick(widget, combination.key(), combination.keyboardModifiers())


def is_platform_shortcut(widget, sequence):
    combination = sequence[0]
    plain = combination.keyboardModifiers() == Qt.KeyboardModifier.NoModifier
    own_copy = sequence == QKeySequence("Ctrl+C") or sequence == QKeySequence("Ctrl+Z")
    return (plain and isinstance(widget, PRESSES.get(combination.key(), ()))) or (
        own_copy
        and widget.metaObject().className() == "BookmarkList"  # in the bookmark list these act on its own content
    )


def test_each_documented_shortcut_triggers_its_action_in_every_view(window, qtbot):
    actions, done, wrong = window.actions_by_name, [], []
    for spec in actions:
        action = actions[spec.name]
        action.triggered.disconnect()
        action.triggered.connect(lambda *_, name=spec.name: done.append(name))
        action.setCheckable(False)
    tried = Counter()
    for name in ("page_map", *(spec.name for spec in DOCKS)):
        if name in window.docks:
            window.docks[name].show()
            window.docks[name].raise_()
        QApplication.processEvents()
        window.views[name].draw_all()
        for widget in focusable(window.views[name]):
            for action, sequence in documented_shortcuts(actions):
                if is_platform_shortcut(widget, sequence):
                    continue
                actions[action].setEnabled(True)
                widget.setFocus()
                if QApplication.focusWidget() is not widget:
                    break
                done.clear()
                press_keys(qtbot, widget, sequence)
                tried[name] += 1
                if done != [action]:
                    wrong.append((name, type(widget).__name__, sequence.toString(), action, list(done)))
    assert not wrong
    views = {"page_map", "console", "throughput", "heatmap", "timeline", "requests", "bookmarks", "inspector", "memory"}
    assert views <= set(tried), "the other views have no focusable content here"


def test_no_two_actions_share_a_shortcut(window):
    keys = Counter(sequence.toString() for _, sequence in documented_shortcuts(window.actions_by_name))
    assert [key for key, times in keys.items() if times > 1] == []


@with_time_views
def test_zoom_keys_zoom_the_focused_view(window, qtbot):
    views, actions = window.views, window.actions_by_name
    timeline, plot, heat = (
        views["timeline"].canvas,
        views["throughput"].charts.panels["decode"].plot,
        views["heatmap"].map,
    )
    seen = {
        "timeline": (timeline, lambda: timeline.shown.span.length_ns),
        "throughput": (plot, lambda: plot.view_box.viewRange()[0][1] - plot.view_box.viewRange()[0][0]),
        "heatmap": (heat, lambda: heat.frame.scale.column_ns),
    }
    for name, (widget, length) in seen.items():
        window.focus_view(name)
        views[name].draw_all()
        widget.setFocus()
        qtbot.waitUntil(widget.hasFocus)
        pitch, before = window.page_map.scene.camera.pitch, length()
        for _ in range(3):
            qtbot.keyClick(widget, KEYS.Key_Plus)
        assert length() < before, name
        qtbot.keyClick(widget, KEYS.Key_F)
        assert length() >= before, name
        assert window.page_map.scene.camera.pitch == pitch, "the page map does not have the focus"
    window.page_map.canvas.setFocus()
    actions["zoom_in"].trigger()
    assert window.page_map.scene.camera.pitch > pitch


@with_time_views
def test_end_key_in_the_timeline_goes_live(window, qtbot, session):
    canvas = window.views["timeline"].canvas
    window.focus_view("timeline")
    canvas.setFocus()
    qtbot.waitUntil(canvas.hasFocus)
    session.timeline.pause()
    qtbot.keyClick(canvas, KEYS.Key_BracketLeft)
    assert session.timeline.loop.begin_ns is None
    qtbot.keyClick(canvas, KEYS.Key_End)
    assert not session.timeline.is_paused


@with_time_views
def test_focused_view_has_a_frame_in_the_accent_color(window, qtbot):
    plot = window.views["throughput"].charts.panels["decode"].plot
    for name, widget in (("throughput", plot), ("timeline", None), ("heatmap", window.views["heatmap"].map)):
        window.focus_view(name)
        window.views[name].draw_all()
        widget = widget or window.views[name].canvas
        widget.setFocus()
        qtbot.waitUntil(widget.hasFocus)
        assert widget.grab().toImage().pixelColor(0, 0).name() == window.themes.theme.accent
        window.page_map.canvas.setFocus()
        assert widget.grab().toImage().pixelColor(0, 0).name() != window.themes.theme.accent


@with_time_views
def test_focus_frame_disappears_from_the_screen_when_the_focus_leaves(window, qtbot):
    """Reads the screen, because `grab()` would repaint the widget and hide a missing repaint."""
    plot = window.views["throughput"].charts.panels["decode"].plot
    canvas = window.page_map.canvas
    for name, widget in (("throughput", plot), ("timeline", window.views["timeline"].canvas), ("heatmap", None)):
        window.focus_view(name)
        window.views[name].draw_all()
        widget = widget or window.views[name].map
        for focused, other in ((widget, canvas), (canvas, widget)):
            focused.setFocus()
            qtbot.waitUntil(lambda shown=focused: accent_on_frame(window, shown) > 0.9)
            qtbot.waitUntil(lambda left=other: accent_on_frame(window, left) == 0, timeout=10_000)


def accent_on_frame(window, widget) -> float:
    """Return the share of accent pixels on the upper, left and right edges of a widget, as on the screen."""
    corner = widget.mapTo(window, QPoint(0, 0))
    image = (
        window.screen().grabWindow(window.winId(), corner.x(), corner.y(), widget.width(), widget.height()).toImage()
    )
    last, height = image.width() - 1, image.height() * 3 // 4  # the frame of the page map ends above its lowest rows
    edges = [(x, 0) for x in range(image.width())] + [(x, y) for x in (0, last) for y in range(height)]
    accent = QColor(window.themes.theme.accent).rgb()
    return sum(image.pixel(x, y) == accent for x, y in edges) / len(edges)


@with_time_views
def test_arrow_keys_in_a_chart_pan_and_move_the_cursor(window, qtbot):
    view = window.views["throughput"]
    window.focus_view("throughput")
    view.charts.refresh_all()
    plot = view.charts.panels["decode"].plot
    plot.setFocus()
    qtbot.waitUntil(plot.hasFocus)
    first, last = plot.view_box.viewRange()[0]
    by = (last - first) / 10
    qtbot.keyClick(plot, KEYS.Key_Left)
    assert not view.charts.is_following
    assert plot.view_box.viewRange()[0] == pytest.approx([first - by, last - by], abs=0.2)
    qtbot.keyClick(plot, KEYS.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert view.charts.bar.time.text()


@with_time_views
def test_escape_closes_the_measurement_before_it_clears_the_selection(window, qtbot, session):
    view = window.views["timeline"]
    window.focus_view("timeline")
    view.draw_all()
    session.selection.select_request(1)
    view.canvas.measure(view.canvas.shown.span)
    view.canvas.setFocus()
    qtbot.waitUntil(view.canvas.hasFocus)
    qtbot.keyClick(view.canvas, KEYS.Key_Escape)
    assert view.canvas.measured is None
    assert session.selection.request == 1
    qtbot.keyClick(view.canvas, KEYS.Key_Escape)
    assert session.selection.request is None


def test_letter_keys_of_the_timeline_are_not_used_by_actions(window):
    taken = {sequence.toString() for _, sequence in documented_shortcuts(window.actions_by_name)}
    assert not taken & {"W", "A", "S", "D"}

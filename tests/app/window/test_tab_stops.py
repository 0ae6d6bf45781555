"""Tests of keyboard focus in the main window: every tab stop is visible, has a name and shows its focus."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, QRect, QSettings, Qt
from PySide6.QtGui import QAccessible
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QComboBox, QLineEdit
from tests.app.window_driver import has_all_views

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording

MAX_STOPS = 400


@pytest.fixture
def window(qapp, tmp_path, qtbot):
    """Window on the sample recording with all views, paused in its middle."""
    desktop = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    window = desktop.open_recording(Recording.open(sample_recording()), 10.0)
    window.resize(1500, 900)
    qtbot.waitUntil(lambda: has_all_views(window) and window.session.mirror.num_active > 0)
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    yield window
    window.close()
    desktop.close()
    desktop.deleteLater()


def tab_stops(window):
    """Press Tab until a widget has the focus for the second time; yields each widget while it has the focus."""
    seen = set()
    while len(seen) < MAX_STOPS:
        QTest.keyClick(QApplication.focusWidget() or window, Qt.Key.Key_Tab)
        QApplication.processEvents()
        widget = QApplication.focusWidget()
        if widget in seen:
            return
        seen.add(widget)
        yield widget
    raise AssertionError(f"more than {MAX_STOPS} Tab stops")


def accessible_name(widget):
    """Return the accessible name; the value of a box or a line is no name."""
    interface = QAccessible.queryAccessibleInterface(widget)
    if isinstance(widget, QComboBox):
        labels = [other for other, kind in interface.relations() if kind == QAccessible.RelationFlag.Label]
        return labels[0].text(QAccessible.Text.Name) if labels else ""
    return widget.accessibleName() if isinstance(widget, QLineEdit) else interface.text(QAccessible.Text.Name)


def widget_path(widget):
    path = []
    around = widget
    while around is not None:
        path.append(f"{type(around).__name__}:{around.objectName()}")
        around = around.parentWidget()
    return " < ".join(path[:6])


def is_partly_visible(widget):
    """Whether a part of the widget lies inside all its ancestors."""
    shown, around = QRect(widget.mapToGlobal(QPoint()), widget.size()), widget.parentWidget()
    while around is not None:
        shown &= QRect(around.mapToGlobal(QPoint()), around.size())
        around = around.parentWidget()
    return widget.isVisible() and not shown.isEmpty()


def shows_focus(widget):
    """Whether the widget looks different with the focus."""
    with_focus = widget.grab().toImage()
    widget.clearFocus()
    without_focus = widget.grab().toImage()
    widget.setFocus()
    return with_focus != without_focus


def test_dock_behind_another_tab_receives_no_keys(session, make_window, qtbot):
    window = make_window(session, with_views=("events", "requests"))
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.focus_view("events")
    search = window.views["events"].text
    search.setFocus()
    window.docks["requests"].raise_()  # as a click on its tab does
    qtbot.waitUntil(lambda: not search.hasFocus())
    QTest.keyClicks(QApplication.focusWidget(), "abc")
    assert search.text() == ""
    assert window.docks["requests"].isAncestorOf(QApplication.focusWidget())


def test_hiding_the_focused_dock_does_not_move_the_focus_within_the_hide_event(
    session, make_window, qtbot, monkeypatch
):
    """Qt 6.11 crashes if a dock gets the focus inside restoreState."""
    window = make_window(session, with_views=("memory",))
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.focus_view("memory")
    searched = []
    monkeypatch.setattr("kvscope_app.window.window_body.focus_next", lambda *_, **__: searched.append(1))
    window.docks["memory"].hide()
    assert searched == []


def test_dock_can_be_floated_and_closed_by_keyboard(session, make_window, qtbot):
    window = make_window(session, with_views=("memory",))
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.focus_view("memory")
    stops = {accessible_name(widget): widget for widget in tab_stops(window)}
    dock = window.docks["memory"]
    for name, is_done in (("Close Memory", dock.isHidden), ("Float Memory", dock.isFloating)):
        dock.show()
        stops[name].setFocus()
        QTest.keyClick(stops[name], Qt.Key.Key_Space)
        assert is_done()


def test_every_tab_stop_is_visible_named_and_shows_the_focus(window, qtbot):
    hidden, unnamed, unmarked = [], [], []
    checked = set()
    for name, dock in window.docks.items():
        window.focus_view(name)
        qtbot.waitUntil(lambda dock=dock: is_partly_visible(dock))
        QTest.qWait(20)  # docks behind tabs move and pass their focus on in later iterations of the event loop
        for widget in tab_stops(window):
            if not is_partly_visible(widget):
                hidden.append(widget_path(widget))
            if widget in checked:
                continue
            checked.add(widget)
            if not accessible_name(widget):
                unnamed.append(widget_path(widget))
            if not shows_focus(widget):
                unmarked.append(widget_path(widget))
    assert hidden == []
    assert unnamed == []
    assert unmarked == []
    assert len(checked) > 90

"""Keyboard focus in the main window: each Tab stop is in sight, has a name and shows that it has the focus."""

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
    """A window on the sample recording, paused in its middle, with all views."""
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
    """Press Tab until the first widget has the focus again; yields each widget while it has the focus."""
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


def name_of(widget):
    """As a screen reader says it; the value of a box or a line is no name."""
    interface = QAccessible.queryAccessibleInterface(widget)
    if isinstance(widget, QComboBox):
        labels = [other for other, kind in interface.relations() if kind == QAccessible.RelationFlag.Label]
        return labels[0].text(QAccessible.Text.Name) if labels else ""
    return widget.accessibleName() if isinstance(widget, QLineEdit) else interface.text(QAccessible.Text.Name)


def described(widget):
    path = []
    around = widget
    while around is not None:
        path.append(f"{type(around).__name__}:{around.objectName()}")
        around = around.parentWidget()
    return " < ".join(path[:6])


def is_seen(widget):
    """Whether a part of it lies inside everything that it is in."""
    shown, around = QRect(widget.mapToGlobal(QPoint()), widget.size()), widget.parentWidget()
    while around is not None:
        shown &= QRect(around.mapToGlobal(QPoint()), around.size())
        around = around.parentWidget()
    return widget.isVisible() and not shown.isEmpty()


def shows_focus(widget):
    """Whether a person sees which widget has the focus."""
    with_focus = widget.grab().toImage()
    widget.clearFocus()
    without_focus = widget.grab().toImage()
    widget.setFocus()
    return with_focus != without_focus


def test_keys_do_not_go_to_a_dock_behind_another_tab(session, make_window, qtbot):
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


def test_hiding_the_focused_dock_uses_the_search_of_qt(session, make_window, qtbot, monkeypatch):
    """Inside restoreState a dock that gets the focus crashes Qt 6.11."""
    window = make_window(session, with_views=("memory",))
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.focus_view("memory")
    searched = []
    monkeypatch.setattr("kvscope_app.window.window_body.focus_next", lambda *_, **__: searched.append(1))
    window.docks["memory"].hide()
    assert searched == []


def test_dock_is_floated_and_closed_by_keys(session, make_window, qtbot):
    window = make_window(session, with_views=("memory",))
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.focus_view("memory")
    stops = {name_of(widget): widget for widget in tab_stops(window)}
    dock = window.docks["memory"]
    for name, is_done in (("Close Memory", dock.isHidden), ("Float Memory", dock.isFloating)):
        dock.show()
        stops[name].setFocus()
        QTest.keyClick(stops[name], Qt.Key.Key_Space)
        assert is_done()


def test_every_tab_stop_is_in_sight_named_and_shows_the_focus(window, qtbot):
    hidden, unnamed, unmarked = [], [], []
    checked = set()
    for name, dock in window.docks.items():
        window.focus_view(name)
        qtbot.waitUntil(lambda dock=dock: is_seen(dock))
        QTest.qWait(20)  # docks behind tabs are moved, and pass their focus on, in later turns of the event loop
        for widget in tab_stops(window):
            if not is_seen(widget):
                hidden.append(described(widget))
            if widget in checked:
                continue
            checked.add(widget)
            if not name_of(widget):
                unnamed.append(described(widget))
            if not shows_focus(widget):
                unmarked.append(described(widget))
    assert hidden == []
    assert unnamed == []
    assert unmarked == []
    assert len(checked) > 90

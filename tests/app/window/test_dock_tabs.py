"""Tests of tabbed docks."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QTabBar


def test_tab_names_are_not_elided_in_a_small_window(session, make_window, qtbot):
    window = make_window(session)
    window.resize(900, 600)
    docks = list(window.docks.values())
    for dock in docks[1:]:
        window.addDockWidget(Qt.DockWidgetArea.RightDockWidgetArea, dock)
        dock.show()
        window.tabifyDockWidget(docks[0], dock)

    def bar():
        bars = window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        return next((one for one in bars if one.count() == len(docks)), None)

    qtbot.waitUntil(lambda: bar() is not None and bar().isVisible(), timeout=60_000)
    found = bar()
    assert found.elideMode() is Qt.TextElideMode.ElideNone
    assert found.usesScrollButtons()
    for place in range(found.count()):
        assert found.tabRect(place).width() >= found.fontMetrics().horizontalAdvance(found.tabText(place))
    assert found.minimumSizeHint().width() < window.width() // 2


def test_shown_dock_is_raised_above_the_other_tabs(session, make_window, qtbot):
    window = make_window(session)
    timeline = window.docks["timeline"]
    for is_shown in (False, True):
        window.docks["requests"].raise_()
        timeline.toggleViewAction().trigger()
        assert timeline.isHidden() is not is_shown
    qtbot.waitUntil(lambda: not timeline.visibleRegion().isEmpty(), timeout=60_000)

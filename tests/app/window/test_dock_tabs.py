"""Many docks in one place: each tab has its whole name."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QTabBar


def test_names_of_tabs_stay_whole_in_a_small_window(session, make_window, qtbot):
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


def test_a_panel_that_is_shown_comes_before_the_others_in_its_place(session, make_window, qtbot):
    window = make_window(session)
    timeline = window.docks["timeline"]
    for is_shown in (False, True):
        window.docks["requests"].raise_()
        timeline.toggleViewAction().trigger()
        assert timeline.isHidden() is not is_shown
    qtbot.waitUntil(lambda: not timeline.visibleRegion().isEmpty(), timeout=60_000)

"""Keyboard navigation between the Tab stops of a window with docks."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDockWidget, QScrollArea, QWidget

from kvscope_app.ui.focus import tab_order
from kvscope_app.views.visibility import is_on_screen


def focus_next(window: QWidget, *, forward: bool) -> bool:
    """Focus the next Tab stop of `window` and scroll to it. Returns False if there is none.

    Replaces Qt's search, which also stops at widgets in docks behind other tabs: Qt moves such docks outside the window
    but leaves them visible.
    """
    others = tab_order(window.focusWidget() or window, forward=forward)
    next_stop = next((each for each in others if each.window() is window and is_tab_stop(each)), None)
    if next_stop is None:
        return False
    next_stop.setFocus(Qt.FocusReason.TabFocusReason if forward else Qt.FocusReason.BacktabFocusReason)
    ancestor = next_stop.parentWidget()
    while ancestor is not None:
        if isinstance(ancestor, QScrollArea):
            ancestor.ensureWidgetVisible(next_stop)
        ancestor = ancestor.parentWidget()
    return True


def is_tab_stop(widget: QWidget) -> bool:
    """Whether Tab stops at `widget`, and its dock, if any, is visible to the user."""
    if not widget.focusPolicy() & Qt.FocusPolicy.TabFocus or widget.focusProxy() is not None:
        return False
    if not widget.isVisible() or not widget.isEnabled():
        return False
    ancestor: QWidget | None = widget
    while ancestor is not None and not isinstance(ancestor, QDockWidget):
        ancestor = ancestor.parentWidget()
    return ancestor is None or ancestor.isWindow() or is_on_screen(ancestor)

"""Draws focus frames, dispatches zoom shortcuts to the focused widget, and iterates over the Tab order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.ui.theme import Theme


@runtime_checkable
class Zoomable(Protocol):
    def zoom_by(self, steps: int) -> None:
        """Zoom in (1), zoom out (-1), or fit everything (0)."""


def zoom_focused(window: Zoomable, steps: int) -> None:
    """Zoom the focused widget or its nearest zoomable ancestor, otherwise `window`."""
    widget: QWidget | None = QApplication.focusWidget()
    while widget is not None and not isinstance(widget, Zoomable):
        widget = widget.parentWidget()
    (window if widget is None else widget).zoom_by(steps)


def tab_order(start: QWidget, *, forward: bool = True) -> Iterator[QWidget]:
    """Yield the widgets after `start` in the Tab order of its window, including the window, until `start` is reached
    again.

    The Python objects of the widgets and of their ancestors are children of their actual parents afterwards.
    """
    found = start
    while True:
        found = (found.nextInFocusChain() if forward else found.previousInFocusChain()) or start
        _set_actual_parents(found)
        if found is start:
            return
        yield found


def _set_actual_parents(widget: QWidget) -> None:
    """Make the Python objects of `widget` and its ancestors children of their actual parents, which Qt ignores.

    PySide makes the Python object that `nextInFocusChain` returns a child of the widget it was called on, whatever the
    widget's actual parent is. A window would then never be freed, and a widget would count as deleted together with its
    predecessor.

    All ancestors are needed: nothing else keeps the Python object of a parent that Qt created itself, such as the tab
    bar of docks, and PySide marks the objects of its children as deleted when it goes. Shift+Tab meets the children
    first.
    """
    around: QWidget | None = widget
    while around is not None:
        parent = around.parentWidget()
        around.setParent(parent)  # also without one: the object is then no longer its predecessor's child
        around = parent


def draw_focus(painter: QPainter, around: QRect, theme: Theme) -> None:
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(theme.color("accent"), 1))
    painter.drawRect(around.adjusted(0, 0, -1, -1))

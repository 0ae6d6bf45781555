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

    PySide makes the Python object that `nextInFocusChain` returns a child of the widget it was called on, whatever the
    widget's actual parent is. A window would then never be freed, and a widget would count as deleted together with its
    predecessor. Therefore `setParent` is called with the actual parent, which Qt ignores.
    """
    found = start
    while True:
        found = (found.nextInFocusChain() if forward else found.previousInFocusChain()) or start
        found.setParent(found.parentWidget())
        if found is start:
            return
        yield found


def draw_focus(painter: QPainter, around: QRect, theme: Theme) -> None:
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(theme.color("accent"), 1))
    painter.drawRect(around.adjusted(0, 0, -1, -1))

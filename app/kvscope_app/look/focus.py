"""Draws the frame of the focused widget, sends the window's zoom keys to it, and walks the Tab order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.look.theme import Theme


@runtime_checkable
class Zooms(Protocol):
    """A widget that can be zoomed."""

    def zoom_by(self, steps: int) -> None:
        """1: a step in, -1: a step out, 0: everything fits."""


def zoom_focused(window: Zooms, steps: int) -> None:
    """Zoom what has the keyboard, or the nearest around it that can be: `window` at the latest."""
    widget: QWidget | None = QApplication.focusWidget()
    while widget is not None and not isinstance(widget, Zooms):
        widget = widget.parentWidget()
    (window if widget is None else widget).zoom_by(steps)


def tab_order(start: QWidget, *, forward: bool = True) -> Iterator[QWidget]:
    """Yield the widgets that follow `start` in the Tab order of its window, until `start` would come again. The window
    itself is one of them.

    PySide makes the Python object that `nextInFocusChain` returns a child of the one that was asked, whatever the
    widget's parent is: a window would never be freed, and a widget would count as deleted with the one before it. So
    each is given its parent again, which Qt ignores.
    """
    found = start
    while True:
        found = (found.nextInFocusChain() if forward else found.previousInFocusChain()) or start
        found.setParent(found.parentWidget())
        if found is start:
            return
        yield found


def draw_focus(painter: QPainter, around: QRect, theme: Theme) -> None:
    """The frame of what has the focus."""
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(theme.color("accent"), 1))
    painter.drawRect(around.adjusted(0, 0, -1, -1))

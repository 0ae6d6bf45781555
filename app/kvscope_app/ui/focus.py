"""Draws focus frames, sends zoom shortcuts to the focused widget, and iterates over the Tab order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.ui.theme import Theme


@runtime_checkable
class Zoomable(Protocol):
    def zoom_by(self, steps: int) -> None: ...


def zoom_focused(window: Zoomable, steps: int) -> None:
    """Zoom the focused widget or its closest zoomable ancestor, or `window` if there is none."""
    widget: QWidget | None = QApplication.focusWidget()
    while widget is not None and not isinstance(widget, Zoomable):
        widget = widget.parentWidget()
    (window if widget is None else widget).zoom_by(steps)


def tab_order(start: QWidget, *, forward: bool = True) -> Iterator[QWidget]:
    """Yield the widgets after `start` in Tab order, including the window, until `start` is reached again.

    The ownership of their Python objects is corrected on the way, see `_set_actual_parents`.
    """
    current = start
    while True:
        current = (current.nextInFocusChain() if forward else current.previousInFocusChain()) or start
        _set_actual_parents(current)
        if current is start:
            return
        yield current


def _set_actual_parents(widget: QWidget) -> None:
    """Make the Python objects of `widget` and its ancestors children of their actual parents.

    PySide makes the Python object that `nextInFocusChain` returns a child of the widget it was called on, whatever the
    widget's actual parent is. A window would then never be freed, and a widget would count as deleted together with its
    predecessor. Setting the actual parent again has no effect in Qt.

    All ancestors are needed. For a parent that Qt created itself, such as the tab bar of docks, only a child keeps the
    Python object alive; when the object is freed, PySide marks the objects of the parent's children as deleted. In
    backward order, the children come before their parent.
    """
    current: QWidget | None = widget
    while current is not None:
        parent = current.parentWidget()
        current.setParent(parent)  # also without one: the object is then no longer its predecessor's child
        current = parent


def draw_focus(painter: QPainter, rect: QRect, theme: Theme) -> None:
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(theme.color("accent"), 1))
    painter.drawRect(rect.adjusted(0, 0, -1, -1))

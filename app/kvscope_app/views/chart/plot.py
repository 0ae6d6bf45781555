"""The plot of a panel: the wheel zooms its time, unless the panels scroll; arrows move it. Knows no curves."""

from __future__ import annotations

from typing import Any, Final

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QPainter, QPaintEvent, QWheelEvent
from PySide6.QtWidgets import QScrollArea

from kvscope_app.look.focus import draw_focus
from kvscope_app.look.theme import DARK, Theme

KEYS: Final = frozenset((Qt.Key.Key_Left, Qt.Key.Key_Right, Qt.Key.Key_Return, Qt.Key.Key_Enter))


class Plot(pg.PlotWidget):  # type: ignore[misc]
    """With Ctrl the wheel always zooms; without, it is for `area` where that has more than it shows."""

    keyed = Signal(object, bool)
    """One of `KEYS` was pressed, and whether with Shift."""
    focused = Signal()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.area: QScrollArea | None = None
        self.theme: Theme = DARK
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in KEYS and not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.keyed.emit(Qt.Key(event.key()), bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
            event.accept()
        else:
            event.ignore()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focused.emit()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self.hasFocus():
            painter = QPainter(self.viewport())
            draw_focus(painter, self.viewport().rect(), self.theme)
            painter.end()

    def wheelEvent(self, event: QWheelEvent) -> None:
        area = self.area
        zooms = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if zooms or area is None or area.verticalScrollBar().maximum() == 0:
            super().wheelEvent(event)
        else:
            QCoreApplication.sendEvent(area.viewport(), event)
            event.accept()

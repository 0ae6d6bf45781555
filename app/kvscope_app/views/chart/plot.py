"""Plot area of a panel with its axes, wheel and keys. Contains no curves."""

from __future__ import annotations

from typing import Final

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QPainter, QPaintEvent, QWheelEvent
from PySide6.QtWidgets import QFrame, QGraphicsGridLayout, QGraphicsItem, QScrollArea

from kvscope_app.ui.focus import draw_focus
from kvscope_app.ui.theme import DARK, Theme

KEYS: Final = frozenset((Qt.Key.Key_Left, Qt.Key.Key_Right, Qt.Key.Key_Return, Qt.Key.Key_Enter))


class Plot(pg.GraphicsView):  # type: ignore[misc]
    """View box with an axis at its left and one below it.

    The wheel scrolls `area` if that has scrollable content, otherwise it zooms. With Ctrl it always zooms.

    pyqtgraph's `PlotItem` is not used, because it creates a menu of sixty widgets per plot. The menu would never be
    shown but be styled on each theme change, and would contain nearly half of all widgets of a window.
    """

    keyed = Signal(object, bool)
    """Emitted with the key when one of `KEYS` is pressed, and whether Shift is pressed too."""
    focused = Signal()

    def __init__(self, left: pg.AxisItem, bottom: pg.AxisItem) -> None:
        super().__init__()
        self.area: QScrollArea | None = None
        self.theme: Theme = DARK
        self.axes = (left, bottom)
        self.view_box = pg.ViewBox(enableMenu=False)
        self._body = pg.GraphicsWidget()
        self._grid = QGraphicsGridLayout()
        self._lay_out()
        self.enableMouse(False)  # the view box moves, not this view
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def set_margins(self, top: int, bottom: int) -> None:
        self._grid.setContentsMargins(0, top, 0, bottom)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in KEYS and not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.keyed.emit(Qt.Key(event.key()), bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
            event.accept()
        else:
            event.ignore()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.viewport().update()  # QWidget updates only the frame, which is a different widget
        self.focused.emit()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.viewport().update()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self.hasFocus():
            painter = QPainter(self.viewport())
            draw_focus(painter, self.viewport().rect(), self.theme)
            painter.end()

    def wheelEvent(self, event: QWheelEvent) -> None:
        area = self.area
        is_zoom = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if is_zoom or area is None or area.verticalScrollBar().maximum() == 0:
            super().wheelEvent(event)
        else:
            QCoreApplication.sendEvent(area.viewport(), event)
            event.accept()

    def _lay_out(self) -> None:
        grid, (left, bottom) = self._grid, self.axes
        grid.setSpacing(0)
        self._body.setLayout(grid)
        for axis, row, column in ((left, 0, 0), (bottom, 1, 1)):
            axis.linkToView(self.view_box)
            axis.setFlag(QGraphicsItem.GraphicsItemFlag.ItemNegativeZStacksBehindParent)
            grid.addItem(axis, row, column)
        grid.addItem(self.view_box, 0, 1)
        for index, stretch in ((0, 1), (1, 100)):
            grid.setColumnStretchFactor(index, stretch)
            grid.setRowStretchFactor(1 - index, stretch)
        self.setCentralItem(self._body)

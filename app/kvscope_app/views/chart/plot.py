"""The plot of a panel: the wheel zooms its time, unless the panels scroll. Knows no curves."""

from __future__ import annotations

from typing import Any

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QScrollArea


class Plot(pg.PlotWidget):  # type: ignore[misc]
    """With Ctrl the wheel always zooms; without, it is for `area` where that has more than it shows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.area: QScrollArea | None = None

    def wheelEvent(self, event: QWheelEvent) -> None:
        area = self.area
        zooms = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if zooms or area is None or area.verticalScrollBar().maximum() == 0:
            super().wheelEvent(event)
        else:
            QCoreApplication.sendEvent(area.viewport(), event)
            event.accept()

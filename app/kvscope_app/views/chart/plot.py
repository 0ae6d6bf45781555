"""The plot of a panel: the wheel zooms its time, unless the panels scroll. Knows no curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent


class Plot(pg.PlotWidget):  # type: ignore[misc]
    """With Ctrl the wheel always zooms. `scrolls` says whether there is something around it that scrolls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scrolls: Callable[[], bool] = _never

    def wheelEvent(self, event: QWheelEvent) -> None:
        if not event.modifiers() & Qt.KeyboardModifier.ControlModifier and self.scrolls():
            event.ignore()  # for the scroll area
        else:
            super().wheelEvent(event)


def _never() -> bool:
    return False

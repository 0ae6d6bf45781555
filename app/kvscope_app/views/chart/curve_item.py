"""A curve that can also be drawn into an SVG file: there in the coordinates of the picture.

Numbers of such a file have six digits, too few for seconds since the boot, and its readers differ in what a line of one
pixel is where its coordinates are stretched.
"""

from __future__ import annotations

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import Qt
from PySide6.QtGui import QPaintEngine, QPainter, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget


class CurveItem(pg.PlotCurveItem):  # type: ignore[misc]
    """pyqtgraph's, on every screen."""

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        """Draw it."""
        if painter.paintEngine().type() is not QPaintEngine.Type.SVG:
            super().paint(painter, option, widget)
        elif self.xData is not None and len(self.xData):
            self._draw_into_svg(painter)

    def _draw_into_svg(self, painter: QPainter) -> None:
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        if self.opts["fillLevel"] is not None and self.opts["brush"] is not None:
            painter.fillPath(to_picture.map(self._getFillPath()), self.opts["brush"])
        painter.setPen(self.opts["pen"])
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawPath(to_picture.map(self.getPath()))
        painter.restore()

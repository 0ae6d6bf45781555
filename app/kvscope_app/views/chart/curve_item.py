"""A curve as wide as it looks on any screen and in pictures of any scale, which can be drawn into an SVG file.

A pen of one pixel, which no scale widens, would be a hair on a screen of many pixels. Into an SVG file it is drawn in
the coordinates of the picture: numbers there have six digits, too few for seconds since the boot, and readers differ in
what a line of one pixel is where its coordinates are stretched.
"""

from __future__ import annotations

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import Qt
from PySide6.QtGui import QPaintEngine, QPainter, QPen, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget


class CurveItem(pg.PlotCurveItem):  # type: ignore[misc]
    """pyqtgraph's, on every screen."""

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        """Draw it."""
        if painter.paintEngine().type() is not QPaintEngine.Type.SVG:
            self._draw_as_wide(painter, option, widget)
        elif self.xData is not None and len(self.xData):
            self._draw_into_svg(painter)

    def _draw_as_wide(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        thin, view = self.opts["pen"], self.getViewWidget()
        on_screen = 0.0 if view is None else (self.sceneTransform() * view.viewportTransform()).m22()
        scale = painter.deviceTransform().m22() / on_screen if on_screen else 1.0  # with the screen's own
        wide = QPen(thin)
        wide.setWidthF(max(1.0, thin.widthF()) * max(1.0, scale))
        self.opts["pen"] = wide
        try:
            super().paint(painter, option, widget)
        finally:
            self.opts["pen"] = thin

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

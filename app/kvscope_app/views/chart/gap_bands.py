"""Shaded time ranges behind the curves, over the full height of the plot, as a single graphics item.

pyqtgraph's item for one range takes 37 KiB. Each chart may have hundreds of ranges, for example after a few minutes
with an engine that answers only now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QPainter, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

_Z_VALUE = -20


class GapBands(pg.GraphicsObject):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gaps: tuple[tuple[float, float], ...] = ()
        self.color = QColor()
        self._bounds = QRectF()
        self.setZValue(_Z_VALUE)

    def show_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        if self.gaps != (new_gaps := tuple(gaps)):
            self.gaps = new_gaps
            self.update()

    def set_color(self, color: str) -> None:
        self.color = QColor(color)
        self.update()

    def boundingRect(self) -> QRectF:
        """Return the visible rectangle, because the bands cover the full height for any range."""
        visible = self.viewRect()
        bounds = QRectF() if visible is None else QRectF(visible)
        if bounds != self._bounds:
            self._bounds = bounds
            self.prepareGeometryChange()
        return bounds

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        """Paint in coordinates of the screen or picture, because SVG numbers have too few digits for plot coordinates,
        which are seconds since boot.
        """
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        for first, last in self.gaps:
            painter.fillRect(self.rect_of(to_picture, first, last), self.color)
        painter.restore()

    def rect_of(self, to_picture: QTransform, first: float, last: float) -> QRectF:
        """Return the visible part of the band between two x values, in coordinates of the screen or picture."""
        visible = self.boundingRect()
        return to_picture.mapRect(QRectF(first, visible.top(), last - first, visible.height()).intersected(visible))

"""Shaded time stretches behind the curves, over the full height of the plot, as a single graphics item.

pyqtgraph's item for one stretch takes 37 KiB, and a few minutes of an engine that answers only now and then, or
that shares its machine with a busy process, have hundreds of them in each chart.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QPainter, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

_BEHIND = -20


class GapBands(pg.GraphicsObject):  # type: ignore[misc]
    """Item that shades `gaps`, each given as (first x, last x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: tuple[tuple[float, float], ...] = ()
        self.color = QColor()
        self._bounds = QRectF()
        self.setZValue(_BEHIND)

    def show_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        if self.gaps != (shown := tuple(gaps)):
            self.gaps = shown
            self.update()

    def set_color(self, color: str) -> None:
        self.color = QColor(color)
        self.update()

    def boundingRect(self) -> QRectF:
        """Return the visible rectangle: the bands cover the full height, whatever the range."""
        seen = self.viewRect()
        bounds = QRectF() if seen is None else QRectF(seen)
        if bounds != self._bounds:
            self._bounds = bounds
            self.prepareGeometryChange()
        return bounds

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        """Paint in the coordinates of the screen or picture: SVG files have too few digits for seconds since boot."""
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        for first, last in self.gaps:
            painter.fillRect(self.rect_of(to_picture, first, last), self.color)
        painter.restore()

    def rect_of(self, to_picture: QTransform, first: float, last: float) -> QRectF:
        """Return the visible rectangle between two x values, in the coordinates of the picture."""
        seen = self.boundingRect()
        return to_picture.mapRect(QRectF(first, seen.top(), last - first, seen.height()).intersected(seen))

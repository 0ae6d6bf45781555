"""Stretches of time shaded behind the curves, from the bottom to the top: one item for all of them.

pyqtgraph's own item for a stretch takes 37 KiB, and minutes of an engine that answers now and then, or beside a busy
neighbour, have hundreds of them in each chart.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QPainter, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

_BEHIND = -20


class GapBands(pg.GraphicsObject):  # type: ignore[misc]
    """Shows `gaps`, each from x to x."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: tuple[tuple[float, float], ...] = ()
        self.color = QColor()
        self._bounds = QRectF()
        self.setZValue(_BEHIND)

    def show_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        """These, and no others."""
        if self.gaps != (shown := tuple(gaps)):
            self.gaps = shown
            self.update()

    def set_color(self, color: str) -> None:
        """Of all of them."""
        self.color = QColor(color)
        self.update()

    def boundingRect(self) -> QRectF:
        """All that is seen: the bands reach from edge to edge, however far that is."""
        seen = self.viewRect()
        bounds = QRectF() if seen is None else QRectF(seen)
        if bounds != self._bounds:
            self._bounds = bounds
            self.prepareGeometryChange()
        return bounds

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        """In the coordinates of the screen or picture: an SVG file has too few digits for seconds since the boot."""
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        for first, last in self.gaps:
            painter.fillRect(self.place_of(to_picture, first, last), self.color)
        painter.restore()

    def place_of(self, to_picture: QTransform, first: float, last: float) -> QRectF:
        """What is seen from x to x, in the coordinates of the picture."""
        seen = self.boundingRect()
        return to_picture.mapRect(QRectF(first, seen.top(), last - first, seen.height()).intersected(seen))

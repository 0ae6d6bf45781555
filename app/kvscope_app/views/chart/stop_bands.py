"""Bands over the time in which the engine stood still: paused by somebody, or suspended. They say so where they are
wide enough, and everywhere in the tooltip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPen, QTransform
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

from kvscope_app.look.fonts import sans
from kvscope_app.look.theme import Theme, mix
from kvscope_app.session.shown_stops import StopBand
from kvscope_app.views.chart.gap_bands import GapBands

_PAD: Final = 4.0


def stop_ground(theme: Theme) -> str:
    """What is behind everything while the engine stands still."""
    return mix(theme.base, theme.warn, 0.17)


class StopBands(GapBands):
    """Shows `bands`."""

    def __init__(self) -> None:
        super().__init__()
        self.bands: tuple[StopBand, ...] = ()
        self._ink = QColor()

    def show_bands(self, bands: Sequence[StopBand]) -> None:
        """These, and no others."""
        if self.bands != (shown := tuple(bands)):
            self.bands = shown
            self.show_gaps([(band.first_s, band.last_s) for band in shown])
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._ink = QColor(theme.warn)
        self.set_color(stop_ground(theme))

    def words_at(self, x: float) -> str:
        """Of the band at `x`; empty where there is none."""
        return next((band.words for band in self.bands if band.first_s <= x <= band.last_s), "")

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        super().paint(painter, option, widget)
        seen, to_picture = self.boundingRect(), painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        painter.setFont(sans(0.82))
        painter.setPen(QPen(self._ink))
        for band in self.bands:
            box = QRectF(band.first_s, seen.top(), band.last_s - band.first_s, seen.height()).intersected(seen)
            place = to_picture.mapRect(box)
            for words in (band.words, band.words.rpartition(",")[0], band.short):
                if words and painter.fontMetrics().horizontalAdvance(words) + 2 * _PAD <= place.width():
                    painter.drawText(place.adjusted(_PAD, 1, 0, 0), Qt.AlignmentFlag.AlignTop, words)
                    break
        painter.restore()

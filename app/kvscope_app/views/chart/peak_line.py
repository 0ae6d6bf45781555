"""Line between a chart's legend and its plot, with links to the maximum of each curve in the visible time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QMouseEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled

_LEFT_MARGIN = 8
_GAP = 12
_PREFIX = "max in view"


@dataclass(frozen=True, slots=True)
class CurvePeak:
    x: float
    """Time of the maximum in seconds."""
    text: str
    """Curve name, value and time of day, such as "running 11 at 23:49:33"."""


class PeakLine(QWidget):
    """Line with as many links to the curves' maxima as fit.

    Painted instead of composed of labels, because the maxima change as values arrive and must not move the layout.
    """

    chosen = Signal(float)

    def __init__(self) -> None:
        super().__init__()
        self.peaks: tuple[CurvePeak, ...] = ()
        self._hovered: CurvePeak | None = None
        self._theme = DARK
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMouseTracking(True)
        self.hide()

    def show_peaks(self, peaks: Sequence[CurvePeak]) -> None:
        self.show()
        if self.peaks != (new_peaks := tuple(peaks)):
            self.peaks, self._hovered = new_peaks, None
            self.unsetCursor()
            self.setAccessibleName(", ".join(f"{_PREFIX} {peak.text}" for peak in new_peaks))
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    @property
    def links(self) -> list[tuple[QRect, CurvePeak]]:
        """Rectangle and maximum of each link that fits, the most important one first."""
        links: list[tuple[QRect, CurvePeak]] = []
        metrics, left = QFontMetricsF(_font()), float(_LEFT_MARGIN)
        for peak in self.peaks:
            width = metrics.horizontalAdvance(f"{_PREFIX} {peak.text}")
            if links and left + width > self.width():
                break
            links.append((QRect(round(left), 0, round(width) + 1, self.height()), peak))
            left += width + scaled(_GAP)
        return links

    def sizeHint(self) -> QSize:
        return QSize(200, round(QFontMetricsF(_font()).height()))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        for rect, peak in self.links:
            font = _font()
            font.setUnderline(peak == self._hovered)
            painter.setFont(font)
            painter.setPen(QColor(self._theme.accent))
            painter.drawText(rect, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, f"{_PREFIX} {peak.text}")
        painter.end()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self._set_hovered(self._peak_at(event))

    def leaveEvent(self, event: object) -> None:
        self._set_hovered(None)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        peak = self._peak_at(event)
        if peak is not None and event.button() == Qt.MouseButton.LeftButton:
            self.chosen.emit(peak.x)

    def _peak_at(self, event: QMouseEvent) -> CurvePeak | None:
        position = event.position().toPoint()
        return next((peak for rect, peak in self.links if rect.contains(position)), None)

    def _set_hovered(self, peak: CurvePeak | None) -> None:
        if peak == self._hovered:
            return
        self._hovered = peak
        if peak is None:
            self.unsetCursor()
        else:
            self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setToolTip("Largest value in the visible time range. Click to go there." if peak is not None else "")
        self.update()


def _font() -> QFont:
    return sans(0.92)

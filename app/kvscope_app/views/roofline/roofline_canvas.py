"""Widget of the roofline: two roofs, a point per step, and a ring around the shown step.

Must not depend on the session.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.announce import announce
from kvscope_app.ui.focus import draw_focus
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.roofline import roofline_painting
from kvscope_app.views.roofline.log_scale import LogScale, bounds
from kvscope_app.views.roofline.points import NO_POINTS, RooflinePoints
from kvscope_telemetry.messages.telemetry import DeviceInfo

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 14, 12, 36
_MAX_DISTANCE_PX: Final = 12.0
_MIN_DECADES: Final = 2.0
UNKNOWN: Final = DeviceInfo(kind="")


class RooflineCanvas(QWidget):
    """Widget of the roofline.

    `chosen` is emitted with the index of a point that was clicked or reached by keyboard, `pointed` with the index of
    the point under the mouse pointer, or -1.
    """

    chosen = Signal(int)
    pointed = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.points: RooflinePoints = NO_POINTS
        self.device = UNKNOWN
        self.selected: int | None = None
        self._hovered = -1
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Roofline: arithmetic intensity against achieved FLOP/s, one point per step")

    def show_points(self, points: RooflinePoints, device: DeviceInfo, selected: int | None) -> None:
        if points is not self.points:
            self._hovered = -1
        self.points, self.device, self.selected = points, device, selected
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.update()

    def announce(self, sentence: str) -> None:
        announce(self, sentence)

    def scales(self) -> tuple[LogScale, LogScale]:
        """Return the scales of intensity and FLOP/s. They cover all points and, if it is known, the ridge point of the
        roofs.
        """
        points, device = self.points, self.device
        has_roofs = device.read_bytes_per_s > 0 and device.flops_per_s > 0
        ridge = [device.flops_per_s / device.read_bytes_per_s] if has_roofs else []
        across = bounds(np.concatenate((points.intensity, ridge)))
        roof = [float(device.flops_per_s)] if device.flops_per_s else []
        up = bounds(np.concatenate((points.flops_per_s, roof)))
        box = self.box()
        return LogScale(*_widened(across), box.left(), box.right()), LogScale(*_widened(up), box.bottom(), box.top())

    def box(self) -> QRectF:
        left, top = scaled(_LEFT), scaled(_TOP)
        return QRectF(left, top, self.width() - left - scaled(_RIGHT), self.height() - top - scaled(_BOTTOM))

    def point_at(self, position: QPointF) -> int:
        """Return the index of the point closest to `position`, or -1 if no point is near enough."""
        if not len(self.points):
            return -1
        across, up = self.scales()
        distances = np.hypot(
            across.positions_of(self.points.intensity) - position.x(),
            up.positions_of(self.points.flops_per_s) - position.y(),
        )
        nearest = int(np.argmin(distances))
        return nearest if float(distances[nearest]) <= _MAX_DISTANCE_PX else -1

    def sizeHint(self) -> QSize:
        return QSize(scaled(360), scaled(240))

    def minimumSizeHint(self) -> QSize:
        return QSize(scaled(180), scaled(110))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self.theme.color("base"))
        if self.box().width() > 20 and self.box().height() > 20:
            across, up = self.scales()
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            roofline_painting.grid(painter, self.box(), across, up, self.theme)
            roofline_painting.roofs(painter, self.box(), across, up, self.device, self.theme)
            roofline_painting.points(painter, self.points, across, up, self.theme)
            for index, color in ((self._hovered, "text"), (self.selected, "selection")):
                if index is not None and 0 <= index < len(self.points):
                    self._draw_ring(painter, index, across, up, color)
        if self.hasFocus():
            draw_focus(painter, self.rect(), self.theme)
        painter.end()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        last = len(self.points) - 1
        current = last if self.selected is None else self.selected
        targets = {Qt.Key.Key_Left: current - 1, Qt.Key.Key_Right: current + 1}
        if event.key() not in targets:
            super().keyPressEvent(event)
        elif last >= 0:
            self.chosen.emit(min(max(targets[Qt.Key(event.key())], 0), last))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self._set_hovered(self.point_at(event.position()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        index = self.point_at(event.position())
        if event.button() is Qt.MouseButton.LeftButton and index >= 0:
            self.chosen.emit(index)

    def leaveEvent(self, event: QEvent) -> None:
        self._set_hovered(-1)
        super().leaveEvent(event)

    def _set_hovered(self, index: int) -> None:
        if index != self._hovered:
            self._hovered = index
            self.pointed.emit(index)
            self.update()

    def _draw_ring(self, painter: QPainter, index: int, across: LogScale, up: LogScale, color: str) -> None:
        x, y = (
            across.position_of(float(self.points.intensity[index])),
            up.position_of(float(self.points.flops_per_s[index])),
        )
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(self.theme.color(color), 2))
        painter.drawEllipse(QPoint(round(x), round(y)), scaled(6), scaled(6))


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    """Widen a range to a minimum number of decades, so that similar points stay close together."""
    low, high = ends
    missing_decades = max(_MIN_DECADES - float(np.log10(high / low)), 0.0)
    factor: float = 10 ** (missing_decades / 2)
    return low / factor, high * factor

"""Base class of widgets with a time axis. The wheel zooms, dragging pans, a click goes to a time, a double click fits.

Owns the mouse state. Subclasses draw; `TimeFrame` owns the visible time.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QPainter, QWheelEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.heatmap.time_frame import TimeFrame
from kvscope_telemetry.running_time import RunningTime

GUTTER: Final = 80
"""Width of the left margin in pixels at 100 % zoom. It is equal in all widgets of the view, so that their times align.
"""
ZOOM_STEP: Final = 1.25
_MIN_DRAG_PX: Final = 4


def gutter() -> int:
    return scaled(GUTTER)


class TimeArea(QWidget):
    chosen = Signal(object)
    """Emitted with the clicked time, in ns since 1970."""
    pointed = Signal(object)
    """Emitted with the pointer's position, a QPointF, or None when the pointer leaves."""

    def __init__(self, frame: TimeFrame, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.frame = frame
        self.theme: Theme = DARK
        self.cursor_ns = 0
        self.hover_ns: int | None = None
        self._stops = RunningTime()
        self._shown_stops = (-1, 0)
        self._press_position: QPointF | None = None
        self._dragged_to: QPointF | None = None
        self._pan_remainder = 0.0
        self.setMouseTracking(True)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        frame.changed.connect(self.update)

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.update()

    def show_cursor(self, time_ns: int) -> None:
        old_ns, self.cursor_ns = self.cursor_ns, time_ns
        if round(self.x_of(time_ns)) != round(self.x_of(old_ns)):
            self.update()

    def show_stops(self, stops: RunningTime) -> None:
        if (stops.version, id(stops)) != self._shown_stops:
            self._stops, self._shown_stops = stops, (stops.version, id(stops))
            self.update()

    def show_hover(self, time_ns: int | None) -> None:
        if time_ns != self.hover_ns:
            self.hover_ns = time_ns
            self.update()

    def x_of(self, time_ns: int) -> float:
        return gutter() + self.frame.scale.x_of(time_ns) / self.devicePixelRatioF()

    def time_at(self, x: float) -> int:
        return self.frame.scale.time_at((x - gutter()) * self.devicePixelRatioF())

    def draw_stops(self, painter: QPainter, share: float) -> None:
        """Draw a band with opacity `share` over each time in which the engine was stopped, and a bar at the
        band's top.
        """
        band_color = QColor(self.theme.base)
        band_color.setAlphaF(share)
        for begin_ns, end_ns in zip(*(times.tolist() for times in self._stops.stretches), strict=True):
            left, right = (min(max(self.x_of(at), gutter()), self.width()) for at in (begin_ns, end_ns))
            if end_ns > self.frame.scale.begin_ns and begin_ns < self.frame.scale.end_ns:
                band = QRectF(left, 0, max(right - left, 1), self.height())
                painter.fillRect(band, band_color)
                painter.fillRect(QRectF(band.left(), 0, band.width(), 3), self.theme.color("warn"))

    def draw_cursor(self, painter: QPainter) -> None:
        for time_ns, color in ((self.hover_ns, "muted"), (self.cursor_ns, "selection")):
            x = round(self.x_of(time_ns)) if time_ns else -1
            if gutter() <= x < self.width():
                if color == "selection":  # visible on any background
                    painter.fillRect(x - 1, 0, 3, self.height(), self.theme.color("base"))
                painter.fillRect(x, 0, 1, self.height(), self.theme.color(color))

    def wheelEvent(self, event: QWheelEvent) -> None:
        steps = event.angleDelta().y() / 120
        horizontal = event.angleDelta().x()
        ratio = self.devicePixelRatioF()
        if steps:
            self.frame.zoom(ZOOM_STEP**steps, max((event.position().x() - gutter()) * ratio, 0.0))
        elif horizontal:
            self.frame.pan(round(horizontal * ratio / 2))
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() in (Qt.MouseButton.LeftButton, Qt.MouseButton.MiddleButton):
            self._press_position, self._pan_remainder = event.position(), 0.0

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._press_position is not None and self._is_drag(event.position()):
            previous = self._dragged_to or self._press_position
            self._dragged_to = event.position()
            self.setCursor(Qt.CursorShape.ClosedHandCursor)
            delta = (event.position().x() - previous.x()) * self.devicePixelRatioF() + self._pan_remainder
            self._pan_remainder = delta - round(delta)
            self.frame.pan(round(delta))
        elif self._press_position is None:
            self.pointed.emit(event.position() if event.position().x() >= gutter() else None)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        was_click = self._press_position is not None and self._dragged_to is None
        self._press_position = self._dragged_to = None
        self.unsetCursor()
        if was_click and event.button() == Qt.MouseButton.LeftButton and event.position().x() >= gutter():
            self.chosen.emit(self.time_at(event.position().x()))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self.frame.fit()

    def leaveEvent(self, event: QEvent) -> None:
        self.pointed.emit(None)

    def _is_drag(self, position: QPointF) -> bool:
        if self._dragged_to is not None:
            return True
        return self._press_position is not None and (position - self._press_position).manhattanLength() >= _MIN_DRAG_PX

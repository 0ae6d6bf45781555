"""A part of the view that has time across: the wheel zooms, dragging moves, a click goes there, a double click fits.

Owns where the mouse is. What is drawn is its heirs'; what time is shown is the frame's.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QPainter, QWheelEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.views.heatmap.time_frame import TimeFrame
from kvscope_telemetry.running_time import RunningTime

GUTTER: Final = 80
"""Pixels at the left for the axis at 100 %, the same in every part, so that times lie above each other."""
ZOOM_STEP: Final = 1.25
_DRAG_FROM: Final = 4


def gutter() -> int:
    """`GUTTER` at the zoom of now."""
    return scaled(GUTTER)


class TimeArea(QWidget):
    """Shows the times of `frame` right of the gutter."""

    chosen = Signal(object)
    """The moment that was clicked, nanoseconds since 1970."""
    pointed = Signal(object)
    """Where the mouse is, a QPointF; None when it left."""

    def __init__(self, frame: TimeFrame, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.frame = frame
        self.theme: Theme = DARK
        self.cursor_ns = 0
        self.hover_ns: int | None = None
        self._stops = RunningTime()
        self._stops_shown = (-1, 0)
        self._press: QPointF | None = None
        self._dragged_to: QPointF | None = None
        self._left_over = 0.0
        self.setMouseTracking(True)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        frame.changed.connect(self.update)

    def apply_theme(self, theme: Theme) -> None:
        """Paint in the colours of `theme`."""
        self.theme = theme
        self.update()

    def show_cursor(self, time_ns: int) -> None:
        """Where the session is."""
        before, self.cursor_ns = self.cursor_ns, time_ns
        if round(self.x_of(time_ns)) != round(self.x_of(before)):
            self.update()

    def show_stops(self, stops: RunningTime) -> None:
        """When the engine stood still."""
        if (stops.version, id(stops)) != self._stops_shown:
            self._stops, self._stops_shown = stops, (stops.version, id(stops))
            self.update()

    def show_hover(self, time_ns: int | None) -> None:
        """The moment the mouse is on, in this part or another."""
        if time_ns != self.hover_ns:
            self.hover_ns = time_ns
            self.update()

    def x_of(self, time_ns: int) -> float:
        """Where a moment is in the widget."""
        return gutter() + self.frame.scale.x_of(time_ns) / self.devicePixelRatioF()

    def time_at(self, x: float) -> int:
        """The moment at `x` of the widget."""
        return self.frame.scale.time_at((x - gutter()) * self.devicePixelRatioF())

    def draw_stops(self, painter: QPainter, share: float) -> None:
        """A veil over each time in which the engine stood still, `share` of it opaque, and a bar along its top."""
        veil = QColor(self.theme.base)
        veil.setAlphaF(share)
        for begin_ns, end_ns in zip(*(times.tolist() for times in self._stops.stretches), strict=True):
            left, right = (min(max(self.x_of(at), gutter()), self.width()) for at in (begin_ns, end_ns))
            if end_ns > self.frame.scale.begin_ns and begin_ns < self.frame.scale.end_ns:
                band = QRectF(left, 0, max(right - left, 1), self.height())
                painter.fillRect(band, veil)
                painter.fillRect(QRectF(band.left(), 0, band.width(), 3), self.theme.color("warn"))

    def draw_cursor(self, painter: QPainter) -> None:
        """The session's moment, and the one under the mouse."""
        for time_ns, color in ((self.hover_ns, "muted"), (self.cursor_ns, "selection")):
            x = round(self.x_of(time_ns)) if time_ns else -1
            if gutter() <= x < self.width():
                if color == "selection":  # seen on every ground
                    painter.fillRect(x - 1, 0, 3, self.height(), self.theme.color("base"))
                painter.fillRect(x, 0, 1, self.height(), self.theme.color(color))

    # Qt's side

    def wheelEvent(self, event: QWheelEvent) -> None:
        steps = event.angleDelta().y() / 120
        sideways = event.angleDelta().x()
        ratio = self.devicePixelRatioF()
        if steps:
            self.frame.zoom(ZOOM_STEP**steps, max((event.position().x() - gutter()) * ratio, 0.0))
        elif sideways:
            self.frame.pan(round(sideways * ratio / 2))
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() in (Qt.MouseButton.LeftButton, Qt.MouseButton.MiddleButton):
            self._press, self._left_over = event.position(), 0.0

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._press is not None and self._is_drag(event.position()):
            before = self._dragged_to or self._press
            self._dragged_to = event.position()
            self.setCursor(Qt.CursorShape.ClosedHandCursor)
            moved = (event.position().x() - before.x()) * self.devicePixelRatioF() + self._left_over
            self._left_over = moved - round(moved)
            self.frame.pan(round(moved))
        elif self._press is None:
            self.pointed.emit(event.position() if event.position().x() >= gutter() else None)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        was_click = self._press is not None and self._dragged_to is None
        self._press = self._dragged_to = None
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
        return self._press is not None and (position - self._press).manhattanLength() >= _DRAG_FROM

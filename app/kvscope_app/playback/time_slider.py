"""Slider over a timeline, in seconds."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QSlider, QStyle, QStyleOptionSlider

from kvscope_app.playback.playback import LONG_JUMP_S, SHORT_JUMP_S

_MAX_STEPS: Final = 1_000_000_000
"""Maximum value of the slider. A QSlider's value has 32 bits, which in milliseconds is only 24.8 days."""


class TimeSlider(QSlider):
    """Slider with steps of 1 ms, or longer steps if the timeline has more than `_MAX_STEPS` milliseconds.

    A click moves the handle to the mouse pointer.
    """

    space_pressed = Signal()
    pointed = Signal(float)
    """Emitted with the time in seconds at the mouse pointer when the pointer moves over the slider."""

    def __init__(self, duration_s: float) -> None:
        super().__init__(Qt.Orientation.Horizontal)
        self._step_s = 0.001
        self.show_range(0.0, duration_s)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAccessibleName("Position on the timeline")
        self.setMouseTracking(True)

    def show_range(self, first_s: float, last_s: float) -> None:
        """Set the range in seconds without emitting a signal."""
        step_s = max(0.001, last_s / _MAX_STEPS)
        if step_s > self._step_s:
            self._step_s = 2 * step_s if self._step_s > 0.001 else step_s
        self.blockSignals(True)
        self.setRange(self._steps(first_s), max(self._steps(last_s), self._steps(first_s)))
        self.setSingleStep(max(1, self._steps(SHORT_JUMP_S)))
        self.setPageStep(max(1, self._steps(LONG_JUMP_S)))
        self.blockSignals(False)

    @property
    def seconds(self) -> float:
        return self.value() * self._step_s

    def show_seconds(self, seconds: float) -> None:
        """Set the position in seconds without emitting a signal."""
        self.blockSignals(True)
        self.setValue(self._steps(seconds))
        self.blockSignals(False)

    @property
    def minimum_s(self) -> float:
        return self.minimum() * self._step_s

    @property
    def maximum_s(self) -> float:
        return self.maximum() * self._step_s

    def x_of(self, seconds: float) -> float:
        """Return the x coordinate of a time, in pixels. It is outside the widget for a time outside the range."""
        handle = self._handle_width()
        share = (seconds - self.minimum_s) / max(self.maximum_s - self.minimum_s, 1e-9)
        return handle / 2 + share * max(self.width() - handle, 1)

    def _steps(self, seconds: float) -> int:
        return round(seconds / self._step_s)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() is Qt.MouseButton.LeftButton:
            self.setSliderDown(True)
            self.setSliderPosition(self._value_at(event.position().x()))
        event.accept()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self.pointed.emit(self._value_at(event.position().x()) * self._step_s)
        if self.isSliderDown():
            self.setSliderPosition(self._value_at(event.position().x()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        self.setSliderDown(False)

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() is QEvent.Type.KeyPress and event.key() == Qt.Key.Key_Space:
            self.space_pressed.emit()
            return True
        return super().event(event)

    def _value_at(self, x: float) -> int:
        handle = self._handle_width()
        span = max(self.width() - handle, 1)
        return QStyle.sliderValueFromPosition(self.minimum(), self.maximum(), round(x - handle / 2), span)

    def _handle_width(self) -> int:
        option = QStyleOptionSlider()
        self.initStyleOption(option)
        return self.style().pixelMetric(QStyle.PixelMetric.PM_SliderLength, option, self)

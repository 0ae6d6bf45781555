"""Bookmarks, alarms and the loop over the slider of the playback bar. Owns no state; the slider takes the mouse."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QObject, QRectF, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QWidget

from kvscope_app.look.clock_text import wall_text
from kvscope_app.look.mark_signs import paint_loop, paint_sign
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.playback.mark_words import mark_text
from kvscope_app.playback.time_slider import TimeSlider
from kvscope_app.playback.timeline_control import Timeline

_NEAR_PX: Final = 5.0
_APART_PX: Final = 2.0
_SIGN_HEIGHT: Final = 8.0
ROOM_FOR_SIGNS: Final = 24
"""Height of the slider: they stand on its groove."""


class SliderMarks(QWidget):
    """Lies over `slider`, as large as it is."""

    def __init__(self, session: Timeline, slider: TimeSlider) -> None:
        super().__init__(slider)
        self._session, self._slider = session, slider
        self.theme: Theme = DARK
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setAttribute(Qt.WidgetAttribute.WA_NoSystemBackground)
        slider.installEventFilter(self)
        session.bookmarks.changed.connect(self.update)
        session.loop.changed.connect(self.update)
        self.resize(slider.size())

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize:
            self.resize(self._slider.size())
        return False

    def text_at(self, seconds: float) -> str:
        """The time there, and which bookmark is near."""
        origin_ns = self._session.origin_ns or 0
        time_ns = origin_ns + round(seconds * 1e9)
        x = self._slider.x_of(seconds)
        near = [mark for mark in self._session.bookmarks.shown if abs(self._x(mark.time_ns) - x) <= _NEAR_PX]
        nearest = min(near, key=lambda mark: abs(self._x(mark.time_ns) - x), default=None)
        return wall_text(time_ns) if nearest is None else mark_text(nearest)

    def paintEvent(self, event: QPaintEvent) -> None:
        session, slider = self._session, self._slider
        loop = session.loop
        if session.origin_ns is None or not (session.bookmarks.shown or loop.begin_ns or loop.end_ns):
            return
        painter = QPainter(self)
        left, right = (None if at is None else self._x(at) for at in (loop.begin_ns, loop.end_ns))
        paint_loop(painter, left, right, QRectF(0, 3, self.width(), self.height() - 6), self.theme)
        before, top = -_APART_PX, self.height() / 2 - _SIGN_HEIGHT - 3
        first, last = slider.x_of(slider.minimum_s), slider.x_of(slider.maximum_s)
        for mark in session.bookmarks.shown:
            x = self._x(mark.time_ns)
            if first - 1 <= x <= last + 1 and x - before >= _APART_PX:
                paint_sign(painter, x, top, _SIGN_HEIGHT, is_note=mark.is_note, theme=self.theme)
                before = x
        painter.end()

    def _x(self, time_ns: int) -> float:
        return self._slider.x_of((time_ns - (self._session.origin_ns or 0)) / 1e9)

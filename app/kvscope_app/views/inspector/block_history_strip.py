"""Strip of a block's history over time: owners, states with their fill, and events.

Owns the visible span. A click moves the cursor; the wheel zooms, dragging pans, a double click shows everything.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QEvent, QPointF, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QHelpEvent, QImage, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QWheelEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import DARK, Theme, owner_color
from kvscope_app.views.inspector.block_history_labels import KIND_COLORS, row_text
from kvscope_app.views.inspector.block_history_picture import BlockHistoryPicture
from kvscope_app.views.timeline.time_axis import axis_times
from kvscope_telemetry.recordings.block_history import BlockHistoryPart
from kvscope_telemetry.summaries.block_moments import KINDS, MomentKind

_OWNER_HEIGHT: Final = 16
"""Height in pixels of the strip's top line, which shows owners. Below it are the lines for states, events and the time
axis.
"""
_STATE_HEIGHT: Final = 34
_MARK_HEIGHT: Final = 9
_AXIS_HEIGHT: Final = 16
_ZOOM_STEP: Final = 0.8
_MIN_DRAG_DISTANCE: Final = 4
_SNAP_DISTANCE_PX: Final = 5
_MARKED_KINDS: Final = (
    MomentKind.EVICTED,
    MomentKind.COPIED,
    MomentKind.SAVED,
    MomentKind.LOADED,
    MomentKind.REUSED,
    MomentKind.SHARED,
    MomentKind.ALLOCATED,
)
_IS_KIND_MARKED: Final = np.array([kind in _MARKED_KINDS for kind in KINDS])
_NO_TIMES: Final = np.empty(0, np.int64)
_MIN_WHOLE_SPAN_NS: Final = 1_000_000_000
"""Minimum length of the complete history's span, so that a short history has a readable time axis."""


class BlockHistoryStrip(QWidget):
    chosen = Signal(object)
    """Emitted with the clicked time, in ns since 1970."""

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self.part: BlockHistoryPart | None = None
        self.span: TimeSpan | None = None
        """Visible range of time if the user zoomed in; None for the complete history."""
        self._block_size = 1
        self._cursor_ns = 0
        """Time of the cursor in ns since 1970; 0 if there is none."""
        self._times = _NO_TIMES
        self._picture = BlockHistoryPicture(DARK)
        self._press: QPointF | None = None
        self._last_drag_point: QPointF | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Block history over time")

    def show_part(self, part: BlockHistoryPart | None, block_size: int, cursor_ns: int) -> None:
        # The block size is constant within an engine start, and another start has another part.
        if part is self.part and cursor_ns == self._cursor_ns:
            return
        self.part, self._block_size, self._cursor_ns = part, block_size, cursor_ns
        self._times = _NO_TIMES if part is None else part.block_moments.times_ns
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self.theme, self._picture = theme, BlockHistoryPicture(theme)
        self.update()

    def fit(self) -> None:
        self.span = None
        self.update()

    @property
    def visible_span(self) -> TimeSpan:
        return self.span or self._whole_span

    @property
    def _whole_span(self) -> TimeSpan:
        """Span from the first known row of the history to its end, at least `_MIN_WHOLE_SPAN_NS` long."""
        part = self.part
        if part is None:
            return TimeSpan(0, _MIN_WHOLE_SPAN_NS)
        begin_ns = part.begin_ns
        if part.rows.size:
            begin_ns = max(begin_ns, int(part.rows["time_ns"][0]))
        return TimeSpan(min(begin_ns, part.end_ns - _MIN_WHOLE_SPAN_NS), part.end_ns)

    def x_of(self, time_ns: int) -> float:
        return self.visible_span.share_at(time_ns) * self.width()

    def text_at(self, time_ns: int) -> str:
        """Return the block's state at a time as text, "" if unknown."""
        part = self.part
        index = -1 if part is None else int(np.searchsorted(part.rows["time_ns"], time_ns, "right")) - 1
        if part is None or index < 0:
            return ""
        return f"{clock_text(time_ns)}: {row_text(part.rows[index])}"

    def sizeHint(self) -> QSize:
        return QSize(240, _OWNER_HEIGHT + _STATE_HEIGHT + _MARK_HEIGHT + _AXIS_HEIGHT)

    def minimumSizeHint(self) -> QSize:
        return QSize(80, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.color("base"))
        if self.part is not None and self.part.rows.size:
            ratio = self.devicePixelRatioF()
            self._picture.draw(self.part.rows, self.visible_span, round(self.width() * ratio), self._block_size)
            self._draw_state(painter, round(_STATE_HEIGHT * ratio))
            self._draw_owners(painter, ratio)
            self._draw_marks(painter)
        self._draw_axis(painter)
        x = round(self.x_of(self._cursor_ns)) if self._cursor_ns else -1
        if 0 <= x <= self.width():
            x = min(x, self.width() - 1)
            painter.fillRect(x - 1, 0, 3, self.height() - _AXIS_HEIGHT, self.theme.color("base"))
            painter.fillRect(x, 0, 1, self.height() - _AXIS_HEIGHT, self.theme.color("selection"))
        if self.hasFocus():
            painter.setPen(self.theme.color("accent"))
            painter.drawRect(self.rect().adjusted(0, 0, -1, -1))
        painter.end()

    def wheelEvent(self, event: QWheelEvent) -> None:
        steps = event.angleDelta().y() / 120
        if steps and self.part is not None:
            share = event.position().x() / max(self.width(), 1)
            span = self.visible_span.zoomed(_ZOOM_STEP**steps, share, self._whole_span)
            self.span = None if span.length_ns >= self._whole_span.length_ns else span
            self.update()
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._press = event.position()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._press is None:
            return
        before = self._last_drag_point or self._press
        if self._last_drag_point is None and abs(event.position().x() - before.x()) < _MIN_DRAG_DISTANCE:
            return
        self._last_drag_point = event.position()
        if self.span is not None:
            moved = (before.x() - event.position().x()) / max(self.width(), 1)
            self.span = self.span.moved(round(moved * self.span.length_ns), self._whole_span)
            self.update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        was_click = self._press is not None and self._last_drag_point is None
        self._press = self._last_drag_point = None
        if was_click and event.button() == Qt.MouseButton.LeftButton and self.part is not None:
            self.chosen.emit(self._time_near(event.position().x()))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.fit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.modifiers() or event.key() not in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            super().keyPressEvent(event)
            return
        is_next = event.key() == Qt.Key.Key_Right
        index = int(np.searchsorted(self._times, self._cursor_ns, "right" if is_next else "left")) - (not is_next)
        if 0 <= index < self._times.size:
            self.chosen.emit(int(self._times[index]))

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.text_at(self._time_near(event.pos().x())), self)
            return True
        return super().event(event)

    def _time_near(self, x: float) -> int:
        """Return the time of an event within `_SNAP_DISTANCE_PX` of `x`, else the time at `x`."""
        time_ns = self.visible_span.time_at(x / max(self.width(), 1))
        index = int(np.searchsorted(self._times, time_ns))
        candidates: list[int] = self._times[max(index - 1, 0) : index + 1].tolist()
        nearest = min(candidates, key=lambda candidate_ns: abs(candidate_ns - time_ns), default=time_ns)
        return nearest if abs(self.x_of(nearest) - x) <= _SNAP_DISTANCE_PX else time_ns

    def _draw_state(self, painter: QPainter, height: int) -> None:
        pixels = self._picture.state_pixels(height)
        image = QImage(
            pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_ARGB32_Premultiplied
        )
        # `pixels` must outlive this call
        painter.drawImage(QRect(0, _OWNER_HEIGHT, self.width(), _STATE_HEIGHT), image)

    def _draw_owners(self, painter: QPainter, ratio: float) -> None:
        pixels = self._picture.owner_pixels()
        image = QImage(pixels.data, pixels.size, 1, pixels.nbytes, QImage.Format.Format_ARGB32_Premultiplied)
        painter.drawImage(QRect(0, 1, self.width(), _OWNER_HEIGHT - 3), image)  # `pixels` must outlive this call
        painter.setFont(sans(0.82))
        min_width = painter.fontMetrics().horizontalAdvance("#0")
        for begin, end, owner in self._picture.owner_runs(round(min_width * ratio)):
            box, text = QRect(round(begin / ratio), 1, round((end - begin) / ratio), _OWNER_HEIGHT - 3), f"#{owner}"
            if painter.fontMetrics().horizontalAdvance(text) + 4 <= box.width():
                is_light = owner_color(owner, self.theme).lightnessF() > 0.45
                painter.setPen(QColor("#0d0f13" if is_light else "#f4f6fa"))
                painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)

    def _draw_marks(self, painter: QPainter) -> None:
        assert self.part is not None, "there are marks to draw"
        span, moments = self.visible_span, self.part.block_moments
        visible = slice(*np.searchsorted(moments.times_ns, (span.begin_ns, span.end_ns)).tolist())
        kinds = moments.kinds[visible]
        x = ((moments.times_ns[visible] - span.begin_ns) * (self.width() / span.length_ns)).astype(np.int64)
        is_marked = _IS_KIND_MARKED[kinds]
        # One mark per pixel: that of the last event there.
        marks = dict(zip(x[is_marked].tolist(), kinds[is_marked].tolist(), strict=True))
        for mark_x, kind in marks.items():
            color = self.theme.color(KIND_COLORS[KINDS[kind]])
            painter.fillRect(mark_x - 1, _OWNER_HEIGHT + _STATE_HEIGHT + 1, 2, _MARK_HEIGHT - 3, color)

    def _draw_axis(self, painter: QPainter) -> None:
        painter.setFont(sans(0.8))
        painter.setPen(self.theme.color("muted"))
        if self.part is None:
            return
        top = self.height() - _AXIS_HEIGHT
        for time_ns, text in axis_times(self.visible_span, self.width(), 80):
            x = round(self.x_of(time_ns))
            width = painter.fontMetrics().horizontalAdvance(text)
            left = min(max(x - width // 2, 0), self.width() - width)
            painter.fillRect(x, top - 2, 1, 3, self.theme.color("border"))
            painter.drawText(QRect(left, top, width + 2, _AXIS_HEIGHT), Qt.AlignmentFlag.AlignVCenter, text)

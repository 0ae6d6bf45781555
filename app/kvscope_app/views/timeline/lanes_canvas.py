"""Widget of the lanes: paints them and handles mouse and keyboard for zooming, panning, selecting and hovering.

Owns the visible span, whether it follows the cursor, and the scroll position of lanes and requests. Selections are only
emitted, not stored here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QRect, Qt, Signal
from PySide6.QtGui import (
    QHelpEvent,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QApplication, QToolTip, QWidget

from kvscope_app.session.time_span import SHORTEST_NS, TimeSpan, whole_span
from kvscope_app.ui.number_text import seconds
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.timeline import lane_text, step_text
from kvscope_app.views.timeline.lane_descriptions import STEP_MARGIN_NS, LaneHit, hit_lane, hit_row, step_hit
from kvscope_app.views.timeline.lane_layout import MARKS, STEPS, LaneLayout, axis_height, gutter, row_height
from kvscope_app.views.timeline.lane_picture import ShownLanes, bare_lanes, draw
from kvscope_app.views.timeline.lane_raster import Pixels
from kvscope_app.views.timeline.mark_lane import LaneMarks
from kvscope_app.views.timeline.request_lanes import RequestLanes
from kvscope_app.views.timeline.step_lane import steps_are_apart
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.summaries.session_overview import SessionOverview

_NEAR_PX: Final = 4
_WHEEL_FACTOR: Final = 0.8
_KEY_FACTOR: Final = 0.5
_KEY_SHARE: Final = 0.1
_CURSOR_SHARE: Final = 0.02
_VEIL: Final = 0.16
_MIN_SIZE: Final = (240, 120)


class LanesCanvas(QWidget):
    """Widget of the lanes. Call `show_overview` on each change; signals report the user's actions."""

    chosen = Signal(object)
    """Emitted with a `LaneHit`: go to its time and select its request."""
    pointed = Signal(str)
    """Emitted with a description of what is under the pointer."""
    moved = Signal()
    """Emitted when the visible span or rows changed."""
    span_chosen = Signal(object)
    """Emitted with the `TimeSpan` that the user zoomed or panned to; None for the whole timeline."""
    measuring = Signal()
    """Emitted when the measured range changes or is cleared, and when its drag ends."""

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self.follows = True
        self.whole = whole_span(0, 0)
        self.length_ns: int | None = None
        """Length of the visible span; None: the whole timeline."""
        self.selected: tuple[int, int] | None = None
        self.batch: tuple[int, ...] = ()
        self.batch_epoch = 0
        self._pointer: QPoint | None = None
        self._pointed_ns: int | None = None
        """End of the step under the pointer."""
        self.cursor_ns = 0
        self.shown = ShownLanes(SessionOverview(), RequestLanes(), self.whole, 0)
        self.first_row = 0
        """Scroll position of lanes and requests, see `LaneLayout.first_row`."""
        self._bare: frozenset[str] = frozenset((MARKS,))
        self._pixels: Pixels | None = None
        self._drag_from: QPoint | None = None
        self._dragged_to: QPoint | None = None
        self.measured: TimeSpan | None = None
        self._measured_from_ns: int | None = None
        """Fixed end of the range whose other end is being dragged."""
        self.setAccessibleName("Timeline")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setMinimumSize(*_MIN_SIZE)

    @property
    def layout_now(self) -> LaneLayout:
        """Positions of the lanes at the widget's size, scrolled to `first_row`."""
        bare = self._bare - {MARKS} if self.shown.marks.bookmarks else self._bare
        has_requests = len(self.shown.lanes.requests) > 0
        return LaneLayout(self.width(), self.height(), bare, self.first_row, has_requests)

    def show_overview(self, overview: SessionOverview, lanes: RequestLanes, whole: TimeSpan, cursor_ns: int) -> None:
        """Show new data. If the canvas follows the cursor, the span moves with it."""
        is_at_end = self.shown.span.end_ns >= self.whole.end_ns
        self.whole, self.cursor_ns = whole, cursor_ns
        self._bare = bare_lanes(overview)
        self.shown.overview, self.shown.lanes, self.shown.until_ns = overview, lanes, whole.end_ns
        span = whole if self.length_ns is None else self.shown.span.inside(whole)
        if self.follows and self.length_ns is not None:
            span = span.showing(whole.end_ns if is_at_end and cursor_ns >= whole.end_ns else cursor_ns, whole)
        self._set_span(span)

    def show_cursor(self, cursor_ns: int) -> None:
        """Move the cursor without other changes."""
        if cursor_ns != self.cursor_ns:
            self.cursor_ns = cursor_ns
            self.update()

    def show_marks(self, marks: LaneMarks) -> None:
        if marks != self.shown.marks:
            self.shown.marks = marks
            self._set_span(self.shown.span)

    def show_steps(self, steps: StepColumns | None) -> None:
        """Show the steps read for the visible span; None if the span is too long to show single steps."""
        if steps is not self.shown.steps:
            self.shown.steps = steps
            self._redraw()

    def show_batch(self, numbers: tuple[int, ...], epoch: int) -> None:
        if (numbers, epoch) != (self.batch, self.batch_epoch):
            self.batch, self.batch_epoch = numbers, epoch
            self.update()

    def show_selected(self, selected: tuple[int, int] | None) -> None:
        if selected != self.selected:
            self.selected = selected
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self._redraw()

    def show_length(self, length_ns: int | None) -> None:
        """Show a span of this length, around the cursor if it is visible; None: the whole timeline."""
        self.length_ns = length_ns
        if length_ns is None:
            self._set_span(self.whole)
            return
        span = self.shown.span
        at = min(max(span.share_at(self.cursor_ns), 0.0), 1.0)
        self._set_span(span.zoomed(length_ns / span.length_ns, at, self.whole))

    def show_span(self, span: TimeSpan) -> None:
        """Show `span`, clamped to the timeline, and stop following the cursor."""
        self.follows = False
        shown = TimeSpan(span.begin_ns, max(span.end_ns, span.begin_ns + SHORTEST_NS)).inside(self.whole)
        self.length_ns = None if shown == self.whole else shown.length_ns
        self._set_span(shown)

    def set_follows(self, follows: bool) -> None:
        """Set whether the cursor is kept visible."""
        self.follows = follows
        if follows:
            self._set_span(self.shown.span.showing(min(self.cursor_ns, self.whole.end_ns), self.whole))
        self.moved.emit()

    def set_first_row(self, row: int) -> None:
        """Scroll so that `row` is the first row of requests; negative: show that many of the lanes that do not fit."""
        before = self.first_row
        self._scroll(row)
        if self.first_row != before:
            self._redraw()
            self.moved.emit()

    def _scroll(self, row: int) -> None:
        self.first_row = min(max(row, -self.layout_now.num_scrolling), self.last_first_row)
        self.shown.first_row = max(self.first_row, 0)

    def set_by_arrival(self, by_arrival: bool) -> None:
        """Use one row per request in order of arrival, or packed rows."""
        self.shown.by_arrival = by_arrival
        self._set_span(self.shown.span)

    @property
    def last_first_row(self) -> int:
        """Maximum scroll position of the request rows."""
        return max(0, self.shown.num_rows - replace(self.layout_now, first_row=0).num_rows)

    def zoom(self, factor: float, at_share: float) -> None:
        """Scale the visible duration by `factor`, keeping the time at `at_share` (0 to 1 of the width) fixed."""
        self._choose_span(self.shown.span.zoomed(factor, at_share, self.whole))

    def zoom_by(self, steps: int) -> None:
        """Zoom in by `steps` (negative: out) around the cursor if it is visible, else the middle; 0: show
        everything."""
        if not steps:
            self.fit()
            return
        self.zoom(_KEY_FACTOR**steps, self._cursor_share)

    def pan(self, by_ns: int) -> None:
        self._choose_span(self.shown.span.moved(by_ns, self.whole))

    @property
    def is_measuring(self) -> bool:
        """Whether the user is dragging an end of the measured range."""
        return self._measured_from_ns is not None

    def measure(self, span: TimeSpan | None) -> None:
        if span != self.measured:
            self.measured = span
            self.update()
            self.measuring.emit()

    def hit_test(self, point: QPoint) -> LaneHit | None:
        """Return what is at a point, or None left of the time axis."""
        if point.x() < gutter():
            return None
        self._update_rows()
        layout, span = self.layout_now, self.shown.span
        time_ns = span.time_at((point.x() - gutter()) / layout.chart_width)
        reach_ns = round(span.length_ns * _NEAR_PX / layout.chart_width)
        row = layout.row_at(point.y())
        if row is not None:
            return hit_row(row, self.shown, time_ns, reach_ns)
        lane = layout.lane_at(point.y())
        return LaneHit(time_ns) if lane is None else hit_lane(lane.name, self.shown, time_ns, reach_ns)

    def paintEvent(self, event: QPaintEvent) -> None:
        layout, scale = self.layout_now, self.devicePixelRatioF()
        self._update_rows()
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.color("base"))
        if self._pixels is None:
            self._pixels = draw(self.shown, layout, self.theme, scale)
        rows, columns = self._pixels.shape
        image = QImage(self._pixels.data, columns, rows, columns * 4, QImage.Format.Format_RGB32)
        painter.drawImage(QRect(gutter(), 0, layout.chart_width, layout.height), image)
        lane_text.paint(painter, self.shown, layout, self.theme, self.selected)
        step_text.paint(painter, self.shown, layout, self.theme, self._pointed_step(), (self.batch_epoch, self.batch))
        self._paint_measured(painter, layout)
        self._paint_cursor(painter, layout)
        if self.hasFocus():
            painter.setPen(self.theme.color("accent"))
            painter.drawRect(self.rect().adjusted(0, 0, -1, -1))
        painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._set_span(self.shown.span)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            found = self.hit_test(event.pos())
            QToolTip.showText(event.globalPos(), plain_tip(found.text) if found is not None else "", self)
            return True
        if event.type() in (QEvent.Type.DevicePixelRatioChange, QEvent.Type.FontChange):
            self._redraw()
        return super().event(event)

    def wheelEvent(self, event: QWheelEvent) -> None:
        phase = event.angleDelta()
        keys = event.modifiers()
        self._pointer = event.position().toPoint()
        is_over_names = self._pointer.x() < gutter() and phase.y() and not keys & Qt.KeyboardModifier.ShiftModifier
        if keys & Qt.KeyboardModifier.ControlModifier or is_over_names:
            self.set_first_row(self.first_row - round(phase.y() / 40))
        elif phase.x() or keys & Qt.KeyboardModifier.ShiftModifier:
            self.pan(-round(self.shown.span.length_ns * _KEY_SHARE * (phase.x() or phase.y()) / 120))
        else:
            share = (event.position().x() - gutter()) / self.layout_now.chart_width
            self.zoom(_WHEEL_FACTOR ** (phase.y() / 120), min(max(share, 0.0), 1.0))
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() is Qt.MouseButton.LeftButton:
            point = event.position().toPoint()
            self._drag_from, self._dragged_to = point, None
            if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
                self._measured_from_ns = self._time_at(point)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self._pointer = event.position().toPoint()
        if self._drag_from is not None:
            self._drag(self._pointer)
        else:
            self._emit_pointed()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        point, was_dragged = self._drag_from, self._dragged_to is not None
        self._drag_from = self._dragged_to = None
        self.unsetCursor()
        if self._measured_from_ns is not None:
            self._measured_from_ns = None
            self.measuring.emit()
        if point is None or was_dragged or event.button() is not Qt.MouseButton.LeftButton:
            return
        found = self.hit_test(point)
        if found is not None:
            self.chosen.emit(found)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.fit()

    def leaveEvent(self, event: QEvent) -> None:
        self._pointer = None
        self.pointed.emit("")
        self._point_at_step(None)
        super().leaveEvent(event)

    def fit(self) -> None:
        self.follows = True
        self.show_length(None)
        self.span_chosen.emit(None)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, span, rows = event.key(), self.shown.span, self.layout_now.num_rows
        step_ns = round(span.length_ns * _KEY_SHARE)
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            sign = 1 if key == Qt.Key.Key_Right else -1
            if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
                self.pan(sign * step_ns)
            else:
                self._move_cursor(sign)
        elif key in (Qt.Key.Key_A, Qt.Key.Key_D):
            self.pan(step_ns if key == Qt.Key.Key_D else -step_ns)
        elif key in (Qt.Key.Key_W, Qt.Key.Key_S):
            self.zoom(_WHEEL_FACTOR if key == Qt.Key.Key_W else 1 / _WHEEL_FACTOR, self._pointed_share())
        elif key in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self._choose_row(1 if key == Qt.Key.Key_Down else -1)
        elif key in (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown):
            self.set_first_row(self.first_row + (rows if key == Qt.Key.Key_PageDown else -rows))
        else:
            super().keyPressEvent(event)

    def _pointed_share(self) -> float:
        """Return the pointer's share of the visible span; that of the cursor if the pointer is not over it."""
        if self._pointer is not None and self._pointer.x() >= gutter():
            return min((self._pointer.x() - gutter()) / self.layout_now.chart_width, 1.0)
        return self._cursor_share

    @property
    def _cursor_share(self) -> float:
        """Cursor's share of the visible span (0 to 1), or 0.5 if it is not visible."""
        share = self.shown.span.share_at(self.cursor_ns)
        return share if 0 <= share <= 1 else 0.5

    def _time_at(self, point: QPoint) -> int:
        """Return the time at a point, clamped to the visible span."""
        share = (point.x() - gutter()) / self.layout_now.chart_width
        return self.shown.span.time_at(min(max(share, 0.0), 1.0))

    def _is_in_steps(self, point: QPoint) -> bool:
        lane = self.layout_now.lane_at(point.y())
        return lane is not None and lane.name == STEPS

    def _point_at_step(self, found: LaneHit | None) -> None:
        time_ns = found.time_ns if found is not None and found.batch else None
        if time_ns != self._pointed_ns:
            self._pointed_ns = time_ns
            self.update()

    def _pointed_step(self) -> int | None:
        """Return the index in `shown.steps` of the step under the pointer. The steps may have been read again since."""
        steps = self.shown.steps
        return None if steps is None or self._pointed_ns is None else steps.index_at(self._pointed_ns, STEP_MARGIN_NS)

    def _move_cursor(self, sign: int) -> None:
        """Move to the next or previous step if steps are drawn; otherwise by `_CURSOR_SHARE` of the visible span."""
        span, steps = self.shown.span, self.shown.steps
        index = None if steps is None else steps.neighbor_index(self.cursor_ns, sign)
        if steps is not None and index is not None and steps_are_apart(steps, span, self.layout_now.chart_width):
            self._go_to(step_hit(steps, index))
        else:
            by_ns = sign * round(span.length_ns * _CURSOR_SHARE)
            self._go_to(LaneHit(min(max(self.cursor_ns + by_ns, self.whole.begin_ns), self.whole.end_ns)))

    def _choose_row(self, sign: int) -> None:
        """Select the request in the row below or above the selected one, at the cursor or as close to it as
        possible."""
        self._update_rows()
        rows = range(self.shown.first_row, self.shown.first_row + self.layout_now.num_rows)
        found = next_in_rows(self.shown, self.selected, sign, self.cursor_ns, rows)
        if found is not None:
            row, request = found
            if row not in rows:
                self.set_first_row(min(max(self.shown.first_row, row - self.layout_now.num_rows + 1), row))
            self._go_to(request)

    def _go_to(self, found: LaneHit) -> None:
        """Select a hit that was reached by keyboard, and scroll it into view."""
        self._set_span(self.shown.span.showing(found.time_ns, self.whole))
        self.chosen.emit(found)

    def _drag(self, point: QPoint) -> None:
        assert self._drag_from is not None, "asked for while a button is down"
        if self._dragged_to is None:
            if (point - self._drag_from).manhattanLength() < QApplication.startDragDistance():
                return
            self._dragged_to = self._drag_from
            is_moving = self._measured_from_ns is None
            self.setCursor(Qt.CursorShape.ClosedHandCursor if is_moving else Qt.CursorShape.SizeHorCursor)
        if self._measured_from_ns is not None:
            begin_ns, end_ns = sorted((self._measured_from_ns, self._time_at(point)))
            self.measure(TimeSpan(begin_ns, max(end_ns, begin_ns + 1)))
            return
        by = point - self._dragged_to
        rows = round(by.y() / row_height())
        self.pan(-round(by.x() * self.shown.span.length_ns / self.layout_now.chart_width))
        self.set_first_row(self.first_row - rows)
        self._dragged_to = QPoint(point.x(), self._dragged_to.y() + rows * row_height())

    def _set_span(self, span: TimeSpan) -> None:
        self.shown.span = span
        self.shown.assign_rows()
        self._scroll(self.first_row)
        self._redraw()
        self.moved.emit()

    def _choose_span(self, span: TimeSpan) -> None:
        """Show the span that the user zoomed or panned to. From then on the cursor is not followed."""
        self.length_ns = None if span == self.whole else span.length_ns
        self.follows = self.length_ns is None
        self._set_span(span)
        self.span_chosen.emit(None if self.length_ns is None else span)

    def _update_rows(self) -> None:
        """Place rows for requests that arrived since the last placement."""
        if self.shown.assigned_version != self.shown.lanes.version:
            self.shown.assign_rows()
            self._pixels = None

    def _redraw(self) -> None:
        self._pixels = None
        self.update()
        self._emit_pointed()

    def _emit_pointed(self) -> None:
        """Emit what is under the pointer. The data may move below a pointer that does not."""
        if self._pointer is None:
            return
        found = self.hit_test(self._pointer)
        self.pointed.emit(found.text.partition("\n")[0] if found is not None else "")
        self._point_at_step(found if self._is_in_steps(self._pointer) else None)

    def _paint_cursor(self, painter: QPainter, layout: LaneLayout) -> None:
        share = self.shown.span.share_at(self.cursor_ns)
        if 0 <= share <= 1:
            x = gutter() + min(round(share * layout.chart_width), layout.chart_width - 1)
            painter.fillRect(x, axis_height() // 2, 1, layout.height, self.theme.color("accent"))
            painter.fillRect(x - 2, axis_height() // 2, 5, 4, self.theme.color("accent"))

    def _paint_measured(self, painter: QPainter, layout: LaneLayout) -> None:
        """Draw the measured range as a translucent band with an edge at each end, and its length on top."""
        if self.measured is None:
            return
        shares = [self.shown.span.share_at(at) for at in (self.measured.begin_ns, self.measured.end_ns)]
        if shares[1] < 0 or shares[0] > 1:
            return
        left, right = (gutter() + round(min(max(share, 0.0), 1.0) * layout.chart_width) for share in shares)
        edge, veil = self.theme.color("accent"), self.theme.color("accent")
        veil.setAlphaF(_VEIL)
        painter.fillRect(left, 0, max(right - left, 1), layout.height, veil)
        for share, x in zip(shares, (left, right), strict=True):
            if 0 <= share <= 1:
                painter.fillRect(x, 0, 1, layout.height, edge)
        words = seconds(self.measured.length_ns / 1e9)
        if painter.fontMetrics().horizontalAdvance(words) + 2 * _NEAR_PX <= right - left:
            painter.setPen(self.theme.color("text"))
            painter.fillRect(left + 1, 0, right - left - 1, axis_height() - 5, self.theme.color("raised"))
            painter.drawText(QRect(left, 0, right - left, axis_height() - 5), Qt.AlignmentFlag.AlignCenter, words)


def next_in_rows(
    shown: ShownLanes, selected: tuple[int, int] | None, sign: int, cursor_ns: int, is_on_screen: range
) -> tuple[int, LaneHit] | None:
    """Return the row above or below the selected request, and a hit for a request in it; None if no request is in the
    span.

    Args:
        selected: (epoch, number) of the selected request.
        sign: 1 for the row below, -1 for the row above.
        cursor_ns: if several requests share the row, the one closest to this time is returned.
        in_sight: visible rows. If the selected request is not in them, the search starts at their edge.
    """
    last = shown.num_rows - 1
    if last < 0:
        return None
    row = _row_of(shown, selected)
    if row in is_on_screen:
        row = min(max(row + sign, 0), last)
    else:
        row = min(is_on_screen.start if sign > 0 else is_on_screen.stop - 1, last)
    requests = shown.lanes.requests
    indices = np.flatnonzero(shown.rows == row)
    begins, ends = requests["begin"][indices], np.minimum(requests["end"][indices], shown.until_ns)
    away = np.maximum(begins - cursor_ns, cursor_ns - ends).clip(0)
    nearest = int(away.argmin())
    request = int(indices[nearest])
    time_ns = min(max(cursor_ns, int(begins[nearest])), int(ends[nearest]))
    return row, LaneHit(time_ns, epoch=int(requests["epoch"][request]), number=int(requests["number"][request]))


def _row_of(shown: ShownLanes, selected: tuple[int, int] | None) -> int:
    request = None if selected is None else shown.lanes.history_of(*selected)
    return -1 if request is None or request >= shown.rows.size else int(shown.rows[request])

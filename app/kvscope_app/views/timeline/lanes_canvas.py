"""Widget of the lanes: paints them, and handles mouse and keyboard for zooming, panning, selecting and hovering.

Owns the visible span, whether it follows the cursor, and the scroll position. Selections are emitted, not stored.
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
from kvscope_app.views.timeline.lane_picture import ShownLanes, draw, lanes_without_data
from kvscope_app.views.timeline.lane_raster import Pixels
from kvscope_app.views.timeline.mark_lane import LaneMarks
from kvscope_app.views.timeline.request_lanes import RequestLanes
from kvscope_app.views.timeline.step_lane import steps_are_wide
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.summaries.session_overview import SessionOverview

_HIT_DISTANCE_PX: Final = 4
_WHEEL_FACTOR: Final = 0.8
_KEY_ZOOM_FACTOR: Final = 0.5
_PAN_SHARE: Final = 0.1
_CURSOR_STEP_SHARE: Final = 0.02
_RANGE_OPACITY: Final = 0.16
_MIN_SIZE: Final = (240, 120)


class LanesCanvas(QWidget):
    """Widget of the lanes. Call `show_overview` on each change of the data; signals report the user's actions."""

    chosen = Signal(object)
    """Emitted with the `LaneHit` that the user clicked or selected by keyboard. The receiver moves the cursor to its
    time and selects its request.
    """
    pointed = Signal(str)
    """Emitted with a description of the item under the mouse pointer, "" if there is none."""
    moved = Signal()
    span_chosen = Signal(object)
    """Emitted with the `TimeSpan` to which the user zoomed or panned; None for the whole timeline."""
    measuring = Signal()
    """Emitted when the measured range changed or was cleared, and when the user stopped dragging its end."""

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self.is_following = True
        self.whole = whole_span(0, 0)
        self.length_ns: int | None = None
        """Length of the visible span in ns; None for the whole timeline."""
        self.selected: tuple[int, int] | None = None
        self.batch: tuple[int, ...] = ()
        self.batch_epoch = 0
        self._pointer: QPoint | None = None
        self._pointed_step_ns: int | None = None
        """End of the step under the pointer, as wall-clock time in ns; None if there is none."""
        self.cursor_ns = 0
        self.shown = ShownLanes(SessionOverview(), RequestLanes(), self.whole, 0)
        self.first_row = 0
        self._lanes_without_data: frozenset[str] = frozenset((MARKS,))
        self._pixels: Pixels | None = None
        self._press_point: QPoint | None = None
        self._last_drag_point: QPoint | None = None
        self.measured: TimeSpan | None = None
        self._measured_from_ns: int | None = None
        self.setAccessibleName("Timeline")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setMinimumSize(*_MIN_SIZE)

    @property
    def lane_layout(self) -> LaneLayout:
        empty_lanes = self._lanes_without_data - {MARKS} if self.shown.marks.bookmarks else self._lanes_without_data
        has_requests = len(self.shown.lanes.requests) > 0
        return LaneLayout(self.width(), self.height(), empty_lanes, self.first_row, has_requests)

    def show_overview(self, overview: SessionOverview, lanes: RequestLanes, whole: TimeSpan, cursor_ns: int) -> None:
        """Show the data in `overview` and `lanes`. `whole` is the span of the whole timeline.

        If the canvas follows the cursor, the visible span moves to contain it.
        """
        is_at_end = self.shown.span.end_ns >= self.whole.end_ns
        self.whole, self.cursor_ns = whole, cursor_ns
        self._lanes_without_data = lanes_without_data(overview)
        self.shown.overview, self.shown.lanes, self.shown.until_ns = overview, lanes, whole.end_ns
        span = whole if self.length_ns is None else self.shown.span.clamped_to(whole)
        if self.is_following and self.length_ns is not None:
            span = span.shifted_to_show(whole.end_ns if is_at_end and cursor_ns >= whole.end_ns else cursor_ns, whole)
        self._set_span(span)

    def show_cursor(self, cursor_ns: int) -> None:
        if cursor_ns != self.cursor_ns:
            self.cursor_ns = cursor_ns
            self.update()

    def show_marks(self, marks: LaneMarks) -> None:
        if marks != self.shown.marks:
            self.shown.marks = marks
            self._set_span(self.shown.span)

    def show_steps(self, steps: StepColumns | None) -> None:
        """Show `steps`, which were read for the visible span. None if the span is too long to show single steps."""
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
        """Show a span of length `length_ns`, around the cursor if that is visible; None shows the whole timeline."""
        self.length_ns = length_ns
        if length_ns is None:
            self._set_span(self.whole)
            return
        span = self.shown.span
        at_share = min(max(span.share_at(self.cursor_ns), 0.0), 1.0)
        self._set_span(span.zoomed(length_ns / span.length_ns, at_share, self.whole))

    def show_span(self, span: TimeSpan) -> None:
        """Show `span`, clamped to the timeline, and stop following the cursor."""
        self.is_following = False
        shown = TimeSpan(span.begin_ns, max(span.end_ns, span.begin_ns + SHORTEST_NS)).clamped_to(self.whole)
        self.length_ns = None if shown == self.whole else shown.length_ns
        self._set_span(shown)

    def set_following(self, is_following: bool) -> None:
        """Set whether the visible span moves to contain the cursor."""
        self.is_following = is_following
        if is_following:
            self._set_span(self.shown.span.shifted_to_show(min(self.cursor_ns, self.whole.end_ns), self.whole))
        self.moved.emit()

    def set_first_row(self, row: int) -> None:
        """Scroll so that request row `row` is the first visible one. If `row` is negative, show the last `-row` of the
        scrolling lanes above the requests.
        """
        row_before = self.first_row
        self._scroll(row)
        if self.first_row != row_before:
            self._redraw()
            self.moved.emit()

    def _scroll(self, row: int) -> None:
        self.first_row = min(max(row, -self.lane_layout.num_scrolling), self.last_first_row)
        self.shown.first_row = max(self.first_row, 0)

    def set_by_arrival(self, is_by_arrival: bool) -> None:
        self.shown.is_by_arrival = is_by_arrival
        self._set_span(self.shown.span)

    @property
    def last_first_row(self) -> int:
        return max(0, self.shown.num_rows - replace(self.lane_layout, first_row=0).num_rows)

    def zoom(self, factor: float, at_share: float) -> None:
        """Multiply the visible duration by `factor`, keeping the time at `at_share` (0 to 1 of the width) in place."""
        self._choose_span(self.shown.span.zoomed(factor, at_share, self.whole))

    def zoom_by(self, steps: int) -> None:
        """Zoom in by `steps`, or out if `steps` is negative. The cursor stays in place if it is visible,
        otherwise the middle of the visible span does. 0 shows the whole timeline.
        """
        if not steps:
            self.fit()
            return
        self.zoom(_KEY_ZOOM_FACTOR**steps, self._cursor_share)

    def pan(self, by_ns: int) -> None:
        self._choose_span(self.shown.span.moved(by_ns, self.whole))

    @property
    def is_measuring(self) -> bool:
        return self._measured_from_ns is not None

    def measure(self, span: TimeSpan | None) -> None:
        if span != self.measured:
            self.measured = span
            self.update()
            self.measuring.emit()

    def hit_test(self, point: QPoint) -> LaneHit | None:
        """Return the item at a point of the widget, or None if the point is left of the time axis."""
        if point.x() < gutter():
            return None
        self._update_rows()
        layout, span = self.lane_layout, self.shown.span
        time_ns = span.time_at((point.x() - gutter()) / layout.chart_width)
        reach_ns = round(span.length_ns * _HIT_DISTANCE_PX / layout.chart_width)
        row = layout.row_at(point.y())
        if row is not None:
            return hit_row(row, self.shown, time_ns, reach_ns)
        lane = layout.lane_at(point.y())
        return LaneHit(time_ns) if lane is None else hit_lane(lane.name, self.shown, time_ns, reach_ns)

    def paintEvent(self, event: QPaintEvent) -> None:
        layout, scale = self.lane_layout, self.devicePixelRatioF()
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
            hit = self.hit_test(event.pos())
            QToolTip.showText(event.globalPos(), plain_tip(hit.text) if hit is not None else "", self)
            return True
        if event.type() in (QEvent.Type.DevicePixelRatioChange, QEvent.Type.FontChange):
            self._redraw()
        return super().event(event)

    def wheelEvent(self, event: QWheelEvent) -> None:
        delta = event.angleDelta()
        modifiers = event.modifiers()
        self._pointer = event.position().toPoint()
        is_over_names = self._pointer.x() < gutter() and delta.y() and not modifiers & Qt.KeyboardModifier.ShiftModifier
        if modifiers & Qt.KeyboardModifier.ControlModifier or is_over_names:
            self.set_first_row(self.first_row - round(delta.y() / 40))
        elif delta.x() or modifiers & Qt.KeyboardModifier.ShiftModifier:
            self.pan(-round(self.shown.span.length_ns * _PAN_SHARE * (delta.x() or delta.y()) / 120))
        else:
            share = (event.position().x() - gutter()) / self.lane_layout.chart_width
            self.zoom(_WHEEL_FACTOR ** (delta.y() / 120), min(max(share, 0.0), 1.0))
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() is Qt.MouseButton.LeftButton:
            point = event.position().toPoint()
            self._press_point, self._last_drag_point = point, None
            if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
                self._measured_from_ns = self._time_at(point)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        self._pointer = event.position().toPoint()
        if self._press_point is not None:
            self._drag(self._pointer)
        else:
            self._emit_pointed()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        point, was_dragged = self._press_point, self._last_drag_point is not None
        self._press_point = self._last_drag_point = None
        self.unsetCursor()
        if self._measured_from_ns is not None:
            self._measured_from_ns = None
            self.measuring.emit()
        if point is None or was_dragged or event.button() is not Qt.MouseButton.LeftButton:
            return
        hit = self.hit_test(point)
        if hit is not None:
            self.chosen.emit(hit)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.fit()

    def leaveEvent(self, event: QEvent) -> None:
        self._pointer = None
        self.pointed.emit("")
        self._set_pointed_step(None)
        super().leaveEvent(event)

    def fit(self) -> None:
        self.is_following = True
        self.show_length(None)
        self.span_chosen.emit(None)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, span, rows = event.key(), self.shown.span, self.lane_layout.num_rows
        step_ns = round(span.length_ns * _PAN_SHARE)
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
        if self._pointer is not None and self._pointer.x() >= gutter():
            return min((self._pointer.x() - gutter()) / self.lane_layout.chart_width, 1.0)
        return self._cursor_share

    @property
    def _cursor_share(self) -> float:
        share = self.shown.span.share_at(self.cursor_ns)
        return share if 0 <= share <= 1 else 0.5

    def _time_at(self, point: QPoint) -> int:
        share = (point.x() - gutter()) / self.lane_layout.chart_width
        return self.shown.span.time_at(min(max(share, 0.0), 1.0))

    def _is_in_steps(self, point: QPoint) -> bool:
        lane = self.lane_layout.lane_at(point.y())
        return lane is not None and lane.name == STEPS

    def _set_pointed_step(self, hit: LaneHit | None) -> None:
        time_ns = hit.time_ns if hit is not None and hit.batch else None
        if time_ns != self._pointed_step_ns:
            self._pointed_step_ns = time_ns
            self.update()

    def _pointed_step(self) -> int | None:
        """Return the index in `shown.steps` of the step under the mouse pointer, or None if there is none. The steps
        may have been read again since the pointer moved.
        """
        steps = self.shown.steps
        if steps is None or self._pointed_step_ns is None:
            return None
        return steps.index_at(self._pointed_step_ns, STEP_MARGIN_NS)

    def _move_cursor(self, sign: int) -> None:
        """Move the cursor to the next (`sign` 1) or previous (-1) step if steps are drawn, else by a share of the
        visible span.
        """
        span, steps = self.shown.span, self.shown.steps
        index = None if steps is None else steps.neighbor_index(self.cursor_ns, sign)
        if steps is not None and index is not None and steps_are_wide(steps, span, self.lane_layout.chart_width):
            self._go_to(step_hit(steps, index))
        else:
            by_ns = sign * round(span.length_ns * _CURSOR_STEP_SHARE)
            self._go_to(LaneHit(min(max(self.cursor_ns + by_ns, self.whole.begin_ns), self.whole.end_ns)))

    def _choose_row(self, sign: int) -> None:
        """Select the request nearest to the cursor in the row below (`sign` 1) or above (-1) the selected request."""
        self._update_rows()
        rows = range(self.shown.first_row, self.shown.first_row + self.lane_layout.num_rows)
        neighbor = next_in_rows(self.shown, self.selected, sign, self.cursor_ns, rows)
        if neighbor is not None:
            row, hit = neighbor
            if row not in rows:
                self.set_first_row(min(max(self.shown.first_row, row - self.lane_layout.num_rows + 1), row))
            self._go_to(hit)

    def _go_to(self, hit: LaneHit) -> None:
        self._set_span(self.shown.span.shifted_to_show(hit.time_ns, self.whole))
        self.chosen.emit(hit)

    def _drag(self, point: QPoint) -> None:
        assert self._press_point is not None, "called while a button is down"
        if self._last_drag_point is None:
            if (point - self._press_point).manhattanLength() < QApplication.startDragDistance():
                return
            self._last_drag_point = self._press_point
            is_moving = self._measured_from_ns is None
            self.setCursor(Qt.CursorShape.ClosedHandCursor if is_moving else Qt.CursorShape.SizeHorCursor)
        if self._measured_from_ns is not None:
            begin_ns, end_ns = sorted((self._measured_from_ns, self._time_at(point)))
            self.measure(TimeSpan(begin_ns, max(end_ns, begin_ns + 1)))
            return
        moved = point - self._last_drag_point
        rows = round(moved.y() / row_height())
        self.pan(-round(moved.x() * self.shown.span.length_ns / self.lane_layout.chart_width))
        self.set_first_row(self.first_row - rows)
        self._last_drag_point = QPoint(point.x(), self._last_drag_point.y() + rows * row_height())

    def _set_span(self, span: TimeSpan) -> None:
        self.shown.span = span
        self.shown.assign_rows()
        self._scroll(self.first_row)
        self._redraw()
        self.moved.emit()

    def _choose_span(self, span: TimeSpan) -> None:
        """Show the span to which the user zoomed or panned, and stop following the cursor unless all is visible."""
        self.length_ns = None if span == self.whole else span.length_ns
        self.is_following = self.length_ns is None
        self._set_span(span)
        self.span_chosen.emit(None if self.length_ns is None else span)

    def _update_rows(self) -> None:
        if self.shown.assigned_version != self.shown.lanes.version:
            self.shown.assign_rows()
            self._pixels = None

    def _redraw(self) -> None:
        self._pixels = None
        self.update()
        self._emit_pointed()

    def _emit_pointed(self) -> None:
        if self._pointer is None:
            return
        hit = self.hit_test(self._pointer)
        self.pointed.emit(hit.text.partition("\n")[0] if hit is not None else "")
        self._set_pointed_step(hit if self._is_in_steps(self._pointer) else None)

    def _paint_cursor(self, painter: QPainter, layout: LaneLayout) -> None:
        share = self.shown.span.share_at(self.cursor_ns)
        if 0 <= share <= 1:
            x = gutter() + min(round(share * layout.chart_width), layout.chart_width - 1)
            painter.fillRect(x, axis_height() // 2, 1, layout.height, self.theme.color("accent"))
            painter.fillRect(x - 2, axis_height() // 2, 5, 4, self.theme.color("accent"))

    def _paint_measured(self, painter: QPainter, layout: LaneLayout) -> None:
        if self.measured is None:
            return
        shares = [self.shown.span.share_at(time_ns) for time_ns in (self.measured.begin_ns, self.measured.end_ns)]
        if shares[1] < 0 or shares[0] > 1:
            return
        left, right = (gutter() + round(min(max(share, 0.0), 1.0) * layout.chart_width) for share in shares)
        edge, fill = self.theme.color("accent"), self.theme.color("accent")
        fill.setAlphaF(_RANGE_OPACITY)
        painter.fillRect(left, 0, max(right - left, 1), layout.height, fill)
        for share, x in zip(shares, (left, right), strict=True):
            if 0 <= share <= 1:
                painter.fillRect(x, 0, 1, layout.height, edge)
        text = seconds(self.measured.length_ns / 1e9)
        if painter.fontMetrics().horizontalAdvance(text) + 2 * _HIT_DISTANCE_PX <= right - left:
            painter.setPen(self.theme.color("text"))
            painter.fillRect(left + 1, 0, right - left - 1, axis_height() - 5, self.theme.color("raised"))
            painter.drawText(QRect(left, 0, right - left, axis_height() - 5), Qt.AlignmentFlag.AlignCenter, text)


def next_in_rows(
    shown: ShownLanes, selected: tuple[int, int] | None, sign: int, cursor_ns: int, visible_rows: range
) -> tuple[int, LaneHit] | None:
    """Return the row next to the selected request, and a hit for a request in that row; None if no request is in the
    span.

    Args:
        selected: (epoch, number) of the selected request, None if no request is selected.
        sign: 1 for the row below, -1 for the row above.
        cursor_ns: If several requests share the row, the one nearest to this time is returned.
        visible_rows: If the selected request's row is not among these, the search starts at their edge.
    """
    last = shown.num_rows - 1
    if last < 0:
        return None
    row = _row_of(shown, selected)
    if row in visible_rows:
        row = min(max(row + sign, 0), last)
    else:
        row = min(visible_rows.start if sign > 0 else visible_rows.stop - 1, last)
    requests = shown.lanes.requests
    indices = np.flatnonzero(shown.rows == row)
    begins, ends = requests["begin"][indices], np.minimum(requests["end"][indices], shown.until_ns)
    distances = np.maximum(begins - cursor_ns, cursor_ns - ends).clip(0)
    nearest = int(distances.argmin())
    request = int(indices[nearest])
    time_ns = min(max(cursor_ns, int(begins[nearest])), int(ends[nearest]))
    return row, LaneHit(time_ns, epoch=int(requests["epoch"][request]), number=int(requests["number"][request]))


def _row_of(shown: ShownLanes, selected: tuple[int, int] | None) -> int:
    request = None if selected is None else shown.lanes.index_of(*selected)
    return -1 if request is None or request >= shown.rows.size else int(shown.rows[request])

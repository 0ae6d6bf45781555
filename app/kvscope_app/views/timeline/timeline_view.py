"""View of the timeline: the whole session over time, in lanes of activity and a lane per request.

Owns the bar above the lanes. Connects the lanes with the session's cursor and selection.
"""

from __future__ import annotations

from typing import ClassVar, Final

from PySide6.QtCore import QEvent, Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QScrollBar, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.session.overview_window import first_relevant_ns
from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan, whole_span
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, head_row, set_icon, tool_button
from kvscope_app.ui.widgets import FittingLabel, SegmentedControl
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import HINT, View
from kvscope_app.views.range_link import RangeLink
from kvscope_app.views.time_navigator import TimeNavigator
from kvscope_app.views.timeline.lane_descriptions import LaneHit
from kvscope_app.views.timeline.lanes_canvas import LanesCanvas
from kvscope_app.views.timeline.mark_lane import LaneMarks
from kvscope_app.views.timeline.measured_range import DelayedRequest, WholeSeconds, measure_range
from kvscope_app.views.timeline.overview_follower import OverviewFollower
from kvscope_app.views.timeline.range_card import RangeCard
from kvscope_app.views.timeline.step_feed import StepFeed
from kvscope_app.views.timeline.step_lane import can_show_steps
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.summaries.run_figures import rows_in

_LENGTHS: Final[dict[str, int | None]] = {
    "All": None,
    "10 min": 600_000_000_000,
    "1 min": 60_000_000_000,
    "10 s": 10_000_000_000,
    "1 s": 1_000_000_000,
}
_MIN_TEXT_WIDTH: Final = 80
_SPACING: Final = 8
_HINTS: Final = (
    "Wheel: zoom. Ctrl+wheel or wheel over the names: scroll. Drag: pan. Shift+drag: measure. Click: go there. "
    "Double-click: show all",
    "Wheel: zoom. Ctrl+wheel: scroll. Drag: pan. Shift+drag: measure. Click: go there. Double-click: show all",
    "Wheel: zoom. Ctrl+wheel: scroll. Drag: pan. Shift+drag: measure. Click: go there",
    "Wheel: zoom. Ctrl+wheel: scroll. Drag: pan. Click: go there",
    "Wheel: zoom. Ctrl+wheel: scroll",
    "Click to go there",
    "",
)
"""Help texts on mouse input, longest first. The longest that fits is shown."""
EMPTY_TEXT: Final = "No history yet.\nThe whole session is drawn here, second by second."


class TimelineView(View):
    title: ClassVar[str] = "Timeline"
    object_name: ClassVar[str] = "timeline"
    refresh_hz: ClassVar[float] = 10.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self._navigator = TimeNavigator(session)
        self._follower = OverviewFollower()
        self._shown_state: tuple[object, ...] = ()
        self._pending_batch: tuple[int, tuple[int, ...]] | None = None
        self.canvas = LanesCanvas()
        self.canvas.shown.adapter_of = self._adapter_of
        self.card = RangeCard(self.canvas)
        self._measured_inputs: tuple[object, ...] = ()
        self.steps = StepFeed(session, self)
        self.lengths = SegmentedControl(list(_LENGTHS), "Visible range")
        self.orders = SegmentedControl(["Packed", "By arrival"], "Request rows")
        self.follow = tool_button("Follow", "Keep the cursor in view", checkable=True, checked=True)
        self.fit = tool_button("Fit", "Show the whole timeline")
        self.link = RangeLink(session.timeline.shared_zoom, self, self.canvas.show_span, self._show_default)
        self.pointed = FittingLabel(*_HINTS)
        self.pointed.setProperty(HINT, True)
        self.rows = QScrollBar(Qt.Orientation.Vertical)
        self.rows.setAccessibleName("Lanes and request rows")
        self._refresh_timer = QTimer(self, singleShot=True, interval=0)
        self._refresh_timer.timeout.connect(self.refresh)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.canvas)

    def refresh(self) -> None:
        session = self.session
        self._navigator.select_pending()
        self._select_pending_batch()
        self.canvas.show_selected(self._navigator.selected)
        self.canvas.show_batch(session.selection.batch, session.mirror.epoch or 0)
        self._show_marks()
        overview, cursor_ns = session.overview, session.timeline.cursor_ns
        whole = self._session_span()
        self._stack.setCurrentIndex(0 if whole is None else 1)
        if whole is None:
            return
        has_more = self._follower.update(overview)
        state = (id(overview), overview.version, self._follower.lanes.version, whole)
        is_moving = (
            self.canvas.is_following and self.canvas.length_ns is not None and cursor_ns != self.canvas.cursor_ns
        )
        if is_moving or not self._shown_state or (state != self._shown_state and not has_more):
            self._shown_state = state
            self.canvas.show_overview(overview, self._follower.lanes, whole, cursor_ns)
            self.link.start()
        else:
            self.canvas.show_cursor(cursor_ns)
        self._show_steps()
        self._show_measured()
        if has_more:
            self._refresh_timer.start()

    def _adapter_of(self, epoch: int, number: int) -> str:
        mirror = self.session.mirror
        row = mirror.requests.row_of(number) if epoch == mirror.epoch else None
        return "" if row is None else mirror.requests.adapters[row]

    def draw_all(self) -> None:
        self.refresh()
        self.steps.finish()

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        self.canvas.show_span(TimeSpan(begin_ns, end_ns))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.canvas.apply_theme(theme)
        set_icon(self.fit, "fit", theme)
        self.link.apply_theme(theme)

    def dismiss(self) -> bool:
        had_range = self.canvas.measured is not None
        self.canvas.measure(None)
        return had_range

    def _show_default(self) -> None:
        self.canvas.is_following = True
        self.canvas.show_length(None)

    def _on_length_chosen(self, index: int) -> None:
        self.canvas.is_following = True
        self.canvas.show_length(list(_LENGTHS.values())[index])
        self.link.choose(None)

    def _on_follow_chosen(self, is_following: bool) -> None:
        self.canvas.set_following(is_following)
        if is_following:
            self.link.choose(None)

    def _show_measured(self) -> None:
        span, overview = self.canvas.measured, self.canvas.shown.overview
        if span is None or self.canvas.is_measuring:
            self._measured_inputs = ()
            self.card.hide()
            return
        rows, lanes = rows_in(overview, WholeSeconds.from_span(span)), self._follower.lanes
        is_growing = rows.stop >= len(overview)
        state = (span, overview, rows.stop - rows.start, overview.version if is_growing else 0)
        if state != self._measured_inputs:
            self._measured_inputs = state
            self.card.show_measured(measure_range(overview, lanes, span, self.canvas.whole.end_ns))

    def _on_delayed_chosen(self, delayed: DelayedRequest) -> None:
        self._on_chosen(LaneHit(delayed.time_ns, "", delayed.epoch, delayed.number))

    def _session_span(self) -> TimeSpan | None:
        overview, timeline_range = self.session.overview, self.session.timeline.range_ns
        if not len(overview) and not len(overview.events):
            return None
        times = [
            (int(t[0]), int(t[-1]) + extra_ns)
            for t, extra_ns in ((overview.time_ns, 10**9), (overview.events.time_ns, 1))
            if t.size
        ]
        spans = times if timeline_range is None else [*times, timeline_range]
        begin_ns, end_ns = min(begin for begin, _ in spans), max(end for _, end in spans)
        if not self.session.timeline.is_file:
            begin_ns = first_relevant_ns(overview, begin_ns, end_ns)
        return whole_span(begin_ns, end_ns)

    def _on_chosen(self, hit: LaneHit) -> None:
        if hit.batch:
            self._pending_batch = (hit.epoch, hit.batch)
        if hit.event is not None:
            self._navigator.show_event(hit.event)
        else:
            self._navigator.choose(hit.time_ns, hit.epoch, hit.number)
        self.refresh()

    def _select_pending_batch(self) -> None:
        batch = self._pending_batch
        if batch is not None and self.session.mirror.epoch == batch[0]:
            self._pending_batch = None
            self.session.selection.select_batch(batch[1])

    def _show_steps(self) -> None:
        canvas = self.canvas
        if not can_show_steps(canvas.shown.overview, canvas.shown.span, canvas.lane_layout.chart_width):
            canvas.show_steps(None)
            return
        self.steps.request(canvas.shown.span, canvas.whole)
        canvas.show_steps(self.steps.steps)

    def _show_hint(self, pointed_text: str) -> None:
        failure = self.steps.failure
        text = pointed_text or (f"Steps cannot be read: {failure}" if failure else "")
        self.pointed.set_variants(*((text,) if text else _HINTS))

    def _on_steps(self) -> None:
        self._show_steps()
        if self.steps.failure:
            self._show_hint("")

    def shut_down(self) -> None:
        self.steps.close()

    def _on_moved(self) -> None:
        self._show_steps()
        self.follow.setChecked(self.canvas.is_following)
        lengths = list(_LENGTHS.values())
        if self.canvas.length_ns in lengths:
            self.lengths.set_current(lengths.index(self.canvas.length_ns))
        else:
            self.lengths.clear()
        first, last = -self.canvas.lane_layout.num_scrolling, self.canvas.last_first_row
        self.rows.blockSignals(True)
        self.rows.setRange(first, last)
        self.rows.setPageStep(self.canvas.lane_layout.num_rows)
        self.rows.setValue(self.canvas.first_row)
        self.rows.blockSignals(False)
        self.rows.setVisible(last > first)

    def _connect(self) -> None:
        canvas = self.canvas
        canvas.chosen.connect(self._on_chosen)
        canvas.moved.connect(self._on_moved)
        canvas.measuring.connect(self._show_measured)
        self.card.closed.connect(self.dismiss)
        self.card.chosen.connect(self._on_delayed_chosen)
        self.steps.changed.connect(self._on_steps)
        canvas.pointed.connect(self._show_hint)
        canvas.span_chosen.connect(self.link.choose)
        self.lengths.chosen.connect(self._on_length_chosen)
        self.orders.chosen.connect(lambda index: canvas.set_by_arrival(index == 1))
        self.follow.clicked.connect(self._on_follow_chosen)
        self.fit.clicked.connect(canvas.fit)
        self.rows.valueChanged.connect(canvas.set_first_row)
        self.session.selection.changed.connect(self.refresh)
        self.session.overview_changed.connect(self._on_overview_changed)
        self.session.bookmarks.changed.connect(self._show_marks)
        self.session.timeline.loop.changed.connect(self._show_marks)

    def _show_marks(self) -> None:
        loop = self.session.timeline.loop
        self.canvas.show_marks(LaneMarks(tuple(self.session.bookmarks.shown), (loop.begin_ns, loop.end_ns)))

    def _on_overview_changed(self) -> None:
        if is_on_screen(self):
            self.refresh()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._hide_overflowing_widgets()
        self.card.move_to_corner()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange and hasattr(self, "_stack"):
            self._hide_overflowing_widgets()

    def _hide_overflowing_widgets(self) -> None:
        free_width = self.width() - 2 * _SPACING - scaled(_MIN_TEXT_WIDTH)
        for widget in (self.fit, self.follow, self.link.button):
            free_width -= widget.sizeHint().width() + _SPACING
        for optional_widget in (self.orders, self.lengths):
            free_width -= optional_widget.sizeHint().width() + _SPACING
            optional_widget.setVisible(free_width >= 0)

    def _lay_out(self) -> None:
        bar = QHBoxLayout()
        bar.setContentsMargins(8, 6, 8, 4)
        bar.setSpacing(_SPACING)
        for widget in (self.lengths, self.fit, self.follow, self.link.button):
            bar.addWidget(widget)
        bar.addWidget(self.pointed, 1)
        bar.addWidget(self.orders)
        lanes = QHBoxLayout()
        lanes.setSpacing(0)
        lanes.addWidget(self.canvas, 1)
        lanes.addWidget(self.rows)
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(bar))
        column.addLayout(lanes, 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(body)

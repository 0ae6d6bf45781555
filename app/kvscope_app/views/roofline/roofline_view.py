"""View of how close each step of the last seconds came to the device's limits.

Owns the length of the visible range. Steps are read from the session's history on disk, or from the recording.
"""

from __future__ import annotations

from typing import ClassVar, Final

from PySide6.QtCore import QMargins, QPointF, QRectF, QSettings, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.setting_names import ROOFLINE_RANGE
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import empty_state, head_row, label
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.capability_messages import engine_name
from kvscope_app.views.inspector.request_page import wall_offset_ns
from kvscope_app.views.range_link import RangeLink
from kvscope_app.views.roofline.point_text import KIND_COLORS, KIND_TEXTS, bound_text, point_text
from kvscope_app.views.roofline.points import NO_POINTS, PointKind, RooflinePoints, points_of
from kvscope_app.views.roofline.roofline_canvas import UNKNOWN, RooflineCanvas
from kvscope_app.views.time_navigator import TimeNavigator
from kvscope_app.views.timeline.lane_descriptions import STEP_MARGIN_NS
from kvscope_app.views.timeline.step_feed import StepFeed
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.telemetry import DeviceInfo

_SIGN, _GAP, _SPACING = 8, 5, 14
_ORDER: Final = (PointKind.DECODE, PointKind.MIXED, PointKind.PREFILL)
NO_ENGINE: Final = "Waiting for the engine's first report.\nEach step becomes a point."
NO_STEPS: Final = "No step ran in this range.\nSend a prompt, or go to a time when the engine was busy."
NOT_KEPT: Final = "This session records no history, so steps cannot be read."
ROOFLINE_RANGES_S: Final = {"10 s": 10, "30 s": 30, "2 min": 120}
"""Selectable ranges in seconds, by label. Each range ends with the shown step.

They are shorter than those of charts, because each step is a point.
"""
NO_STEPS_HERE: Final = "This address reports devices only; no steps run here."
NOT_RECORDED: Final = "This recording does not contain the work of steps (simulations have none)."
_HELP: Final = "Click a point to go to its step"


class RooflineView(View):
    title: ClassVar[str] = "Roofline"
    object_name: ClassVar[str] = "roofline"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.canvas = RooflineCanvas()
        self.legend = RooflineLegend()
        self.ranges = SegmentedControl(list(ROOFLINE_RANGES_S), "Visible range")
        self.text_label = label("", "muted", wraps=True, elastic=True)
        self.text_label.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.text_label.setMinimumHeight(
            3 * self.text_label.fontMetrics().lineSpacing()
        )  # so that the chart keeps its size
        self.link = RangeLink(session.timeline.shared_zoom, self, self._show_only, lambda: self._show_only(None))
        self.feed = StepFeed(session, self)
        self.points: RooflinePoints = NO_POINTS
        self._range_s = next(iter(ROOFLINE_RANGES_S.values()))
        self._span: TimeSpan | None = None
        self._fixed_span: TimeSpan | None = None
        """Range linked from other views, at most as long as the longest of `ROOFLINE_RANGES_S`; None if the range ends
        with the shown step.
        """
        self._navigator = TimeNavigator(session)
        self._pending_batch: tuple[int, tuple[int, ...]] | None = None
        """(epoch, request numbers) of the chosen step, to be selected once that epoch is shown."""
        self.empty_label = empty_state(NO_ENGINE)
        self._lay_out()
        self._connect()
        self.link.start()
        self.setFocusProxy(self.canvas)

    def restore_settings(self, settings: QSettings) -> None:
        range_name = str(settings.value(ROOFLINE_RANGE, ""))
        if range_name in ROOFLINE_RANGES_S:
            self._range_s = ROOFLINE_RANGES_S[range_name]
            self.ranges.set_current(list(ROOFLINE_RANGES_S).index(range_name))

    def save_settings(self, settings: QSettings) -> None:
        settings.setValue(ROOFLINE_RANGE, next(name for name, s in ROOFLINE_RANGES_S.items() if s == self._range_s))

    def refresh(self) -> None:
        self._select_pending_batch()
        available, hello = self.session.timeline.range_ns, self.session.mirror.hello
        if hello is not None and not self.session.mirror.capabilities.blocks:
            self._show_empty(NO_STEPS_HERE)
            return
        if hello is None or available is None:
            has_none = hello is None or self.session.disk_history is not None
            self._show_empty(NO_ENGINE if has_none else NOT_KEPT)
            return
        self._span = self._span_around(TimeSpan(*available))
        if self._span.end_ns > available[0]:
            self.feed.request(self._span, TimeSpan(*available))
        self._show(self._span.begin_ns, self._span.end_ns)

    def draw_all(self) -> None:
        self.refresh()
        self.feed.finish()
        self.refresh()

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        self._show_only(TimeSpan(begin_ns, end_ns))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.canvas.apply_theme(theme)
        self.legend.apply_theme(theme)
        self.link.apply_theme(theme)

    def shut_down(self) -> None:
        self.feed.close()

    @property
    def device(self) -> DeviceInfo:
        hello = self.session.mirror.hello
        return UNKNOWN if hello is None else hello.device

    def _span_around(self, available: TimeSpan) -> TimeSpan:
        """Return the linked range or, without one, a range that ends with the shown step.

        A range that ends with a step is retained while other steps in it are shown, so that the points do not move.
        """
        if self._fixed_span is not None:
            return self._fixed_span.clamped_to(available)
        timeline, cursor_ns = self.session.timeline, self._newest_ns()
        length_ns = round(self._range_s * 1e9)
        span = self._span
        may_stay = not timeline.is_live and span is not None and span.length_ns == length_ns
        if may_stay and span is not None and span.begin_ns <= cursor_ns <= span.end_ns:
            return span
        begin_ns = cursor_ns - length_ns
        if timeline.is_file:
            begin_ns = max(begin_ns, available.begin_ns)
        return TimeSpan(begin_ns, begin_ns + length_ns)

    def _newest_ns(self) -> int:
        """Return when the shown state was published, in ns. The time is long ago if the engine has been idle since."""
        mirror, cursor_ns = self.session.mirror, self.session.timeline.cursor_ns
        if mirror.hello is None or not mirror.time_ns:
            return cursor_ns + STEP_MARGIN_NS
        return min(cursor_ns, mirror.time_ns + wall_offset_ns(mirror.hello)) + STEP_MARGIN_NS

    def _show(self, begin_ns: int, end_ns: int) -> None:
        steps = self.feed.steps
        points = points_of(steps, begin_ns, end_ns)
        if not len(points):
            step_range = steps.within(begin_ns, end_ns)
            self._show_empty(self._why_nothing(step_range.stop > step_range.start))
            return
        self.points = points
        self._stack.setCurrentIndex(1)
        mirror = self.session.mirror
        index = points.index_of_step(mirror.epoch, mirror.step)
        if index is None and self.session.timeline.is_live:
            index = len(points) - 1  # the newest step read; steps continue meanwhile
        self.canvas.show_points(points, self.device, index)
        if not self.canvas.underMouse() or not self.text_label.text():  # there was nothing to hover before
            self._show_point_text(-1)

    def _why_nothing(self, has_run: bool) -> str:
        capabilities = self.session.mirror.capabilities
        if has_run or not capabilities.steps:
            if self.session.timeline.is_file and capabilities.steps:
                return NOT_RECORDED
            return f"{engine_name(capabilities)} does not report the work of its steps.\nkvscope's own engine does."
        if self.feed.failure:
            return f"Steps cannot be read: {self.feed.failure}"
        return "Reading…" if self.feed.is_reading and not len(self.feed.steps) else NO_STEPS

    def _show_empty(self, reason: str) -> None:
        self.points = NO_POINTS
        self.canvas.show_points(NO_POINTS, self.device, None)
        self.empty_label.setText(reason)
        self._stack.setCurrentIndex(0)
        self.text_label.setText("")

    def _show_point_text(self, index: int) -> None:
        shown_index = self.canvas.selected if index < 0 else index
        if shown_index is None or not 0 <= shown_index < len(self.points):
            self.text_label.setText(_HELP if len(self.points) else "")
            return
        bound = bound_text(
            float(self.points.bytes_per_s[shown_index]), float(self.points.flops_per_s[shown_index]), self.device
        )
        text = point_text(self.points, shown_index, self.device) + (f" · limited by {bound}" if bound else "")
        self.text_label.setText(text)

    def _choose(self, index: int) -> None:
        if not 0 <= index < len(self.points):
            return
        steps, step_index = self.points.steps, int(self.points.step_index[index])
        self._pending_batch = (int(steps.epoch[step_index]), tuple(steps.batch(step_index).numbers.tolist()))
        self._navigator.choose(int(steps.end_ns[step_index]) + STEP_MARGIN_NS)
        self.canvas.announce(point_text(self.points, index, self.device))
        self.refresh()

    def _select_pending_batch(self) -> None:
        pending = self._pending_batch
        if pending is not None and self.session.mirror.epoch == pending[0]:
            self._pending_batch = None
            self.session.selection.select_batch(pending[1])

    def _set_range(self, index: int) -> None:
        self._range_s = list(ROOFLINE_RANGES_S.values())[index]
        self._show_only(None)
        self.link.choose(None)

    def _show_only(self, span: TimeSpan | None) -> None:
        longest_ns = max(ROOFLINE_RANGES_S.values()) * 10**9
        if span is not None and span.length_ns > longest_ns:
            span = TimeSpan(span.end_ns - longest_ns, span.end_ns)
        self._fixed_span = span
        if span is None:
            self.ranges.set_current(list(ROOFLINE_RANGES_S.values()).index(round(self._range_s)))
        else:
            self.ranges.clear()
        self._refresh_if_visible()

    def _refresh_if_visible(self) -> None:
        if is_on_screen(self):
            self.refresh()

    def _connect(self) -> None:
        self.ranges.chosen.connect(self._set_range)
        self.canvas.chosen.connect(self._choose)
        self.canvas.pointed.connect(self._show_point_text)
        self.feed.changed.connect(self._refresh_if_visible)
        self.session.timeline.cursor_changed.connect(self._refresh_if_visible)

    def _lay_out(self) -> None:
        self.ranges.setToolTip("Range before the current step")
        top = head_row(FlowLayout(self.ranges, self.link.button, self.legend, margins=QMargins(), spacing=10))
        pages = QWidget()
        self._stack = QStackedLayout(pages)
        self._stack.addWidget(self.empty_label)
        self._stack.addWidget(self.canvas)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(8, 6, 8, 6)
        layout.setSpacing(4)
        layout.addWidget(top)
        layout.addWidget(pages, 1)
        layout.addWidget(self.text_label)


class RooflineLegend(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Circle: decode step, diamond: mixed, square: prefill")

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        text_width = sum(metrics.horizontalAdvance(KIND_TEXTS[kind]) for kind in _ORDER)
        return QSize(text_width + 3 * scaled(_SIGN + _GAP) + 2 * scaled(_SPACING) + 8, metrics.height() + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        left, middle, size = 0.0, self.height() / 2, scaled(_SIGN)
        for kind in _ORDER:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self.theme.color(KIND_COLORS[kind]))
            box = QRectF(left, middle - size / 2, size, size)
            if kind is PointKind.DECODE:
                painter.drawEllipse(box)
            elif kind is PointKind.PREFILL:
                painter.drawRect(box)
            else:
                x, half = box.center().x(), size / 2
                corners = (QPointF(x, box.top()), QPointF(x + half, middle), QPointF(x, box.bottom()))
                painter.drawPolygon(QPolygonF([*corners, QPointF(x - half, middle)]))
            painter.setPen(self.theme.color("muted"))
            left += size + scaled(_GAP)
            text = KIND_TEXTS[kind]
            width = painter.fontMetrics().horizontalAdvance(text)
            painter.drawText(QRectF(left, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter, text)
            left += width + scaled(_SPACING)
        painter.end()

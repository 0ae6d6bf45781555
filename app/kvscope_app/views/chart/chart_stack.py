"""Charts that share a time axis, the time at the pointer, and a layout.

Owns the panels, their time range and their layout. Subclasses supply the curves of each chart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Final

from PySide6.QtCore import QEvent, QSettings, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.session.session import Session
from kvscope_app.session.stop_bands import stop_bands
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.chart.panel import ChartPanel
from kvscope_app.views.chart.time_bar import DEFAULT_RANGE, RANGES_S, TimeBar
from kvscope_app.views.range_link import RangeLink
from kvscope_app.views.visibility import is_on_screen

MIN_RANGE_S: Final = min(RANGES_S.values())
_PANEL_MIN_WIDTH: Final = 310
_MAX_COLUMNS: Final = 3


class PanelGrid(QWidget):
    """Chart panels by name, in as many columns as fit, at most `max_columns`."""

    max_columns: ClassVar[int] = _MAX_COLUMNS
    _num_columns = 0

    def __init__(self) -> None:
        super().__init__()
        self.panels: dict[str, ChartPanel] = {}
        self.theme: Theme = DARK
        self.shown: tuple[str, ...] = ()
        """Names of the visible panels, in order."""
        self._area: QScrollArea | None = None
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(0, 0, 0, 0)
        self.column.setSpacing(6)
        self.grid = QGridLayout()
        self.grid.setHorizontalSpacing(10)
        self.grid.setVerticalSpacing(8)
        self.column.addLayout(self.grid)

    @property
    def num_columns(self) -> int:
        return self._num_columns

    def set_panels(self, panels: Mapping[str, ChartPanel]) -> None:
        """Replace all panels. The new panels stay hidden until `show_panels` names them."""
        for panel in self.panels.values():
            self.grid.removeWidget(panel)
            panel.hide()
            panel.deleteLater()
        self.panels, self.shown = {}, ()
        self.add_panels(panels)

    def add_panels(self, panels: Mapping[str, ChartPanel]) -> None:
        """Add panels. They stay hidden until `show_panels` names them."""
        self.panels.update(panels)
        for panel in panels.values():
            panel.setParent(self)
            panel.hide()
            panel.apply_theme(self.theme)
            panel.plot.area = self._area

    def show_panels(self, names: Collection[str]) -> None:
        columns = max(1, min(self.max_columns, self.width() // scaled(_PANEL_MIN_WIDTH)))
        if tuple(names) == self.shown and columns == self._num_columns:
            return
        self.shown, self._num_columns = tuple(names), columns
        for name, panel in self.panels.items():
            self.grid.removeWidget(panel)
            panel.setVisible(name in self.shown)
        for index, name in enumerate(self.shown):
            self.grid.addWidget(self.panels[name], index // columns, index % columns)
            is_fixed = self.panels[name].minimumHeight() == self.panels[name].maximumHeight()
            self.panels[name].show_time_labels(is_fixed or index >= len(self.shown) - columns)
        self.grid.activate()  # without this, a paint before Qt's layout would show all panels on top of each other

    def set_scroll_area(self, area: QScrollArea | None) -> None:
        """Set the scroll area that receives wheel events over the charts. If None, the wheel zooms."""
        self._area = area
        for panel in self.panels.values():
            panel.plot.area = area

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        for panel in self.panels.values():
            panel.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.show_panels(self.shown)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._num_columns:
            self.show_panels(self.shown)


class ChartStack(PanelGrid):
    """Charts of one session, with the bar that selects their time range.

    A subclass names the charts with content (`charts_with_content`), draws one (`draw_curves`) and returns the values
    at a time (`texts_at`). Times are seconds of the monotonic clock.
    """

    range_setting: ClassVar[str]
    """Settings key of the time range that the user chose."""
    default_range: ClassVar[str] = DEFAULT_RANGE
    charts_per_refresh: ClassVar[int] = 1
    """Number of charts drawn per `refresh`, which limits the duration of a call."""
    max_lag_s: ClassVar[float] = 1.5
    """The session's cursor is not drawn if it is at most this many seconds before the right edge."""

    def __init__(self, session: Session, heading: str = "") -> None:
        """Create the stack.

        With a `heading`, the heading and the time bar are above the charts. Without one, the caller lays out the time
        bar.
        """
        super().__init__()
        self.session = session
        self.link = RangeLink(session.timeline.shared_zoom, self, self._on_linked, lambda: self._on_linked(None))
        self.bar = TimeBar(self.link.button, is_file=session.timeline.is_file, inset=not heading)
        self.range_s = RANGES_S[self.default_range]
        self.bar.show_range(self.range_s)
        self.hover_s: float | None = None
        """Time in seconds at the pointer; None if the pointer is not over a chart."""
        span = session.timeline.shared_zoom.span
        self._fixed_range = None if span is None else self._to_seconds(span)
        """First and last visible second; None while the charts follow the present."""
        self.bar.set_following(span is None)
        self._value_time_s = 0.0
        """Time in seconds of the legends' values while the pointer is not over a chart."""
        self._next_panel = 0
        self._scroll_timer = QTimer(self)
        self._scroll_timer.setSingleShot(True)
        self._scroll_timer.timeout.connect(self.refresh_visible)
        if heading:
            self.column.insertWidget(0, label(heading, "heading"))
            self.column.insertWidget(1, self.bar)
        self.bar.range_chosen.connect(self._on_length_chosen)
        self.bar.live_requested.connect(self._on_follow_chosen)

    # Methods that subclasses override

    def charts_with_content(self, first_s: float, last_s: float) -> Sequence[str]:
        raise NotImplementedError

    def fetch_data(self, names: Sequence[str], first_s: float, last_s: float) -> None:
        """Fetch the data of the charts `names`. Called once before they are drawn."""

    def draw_curves(self, name: str, first_s: float, last_s: float) -> None:
        raise NotImplementedError

    def texts_at(self, name: str, at_s: float) -> Mapping[str, str]:
        raise NotImplementedError

    def end_s(self) -> float:
        """Return the time of the right edge while the charts follow the present.

        It is rounded up to a whole second, so that charts drawn in successive calls show the same time.
        """
        return float(math.ceil(self.session.timeline.shown_monotonic_ns / 1e9))

    def available_range(self, last_s: float) -> tuple[float, float]:
        """Return the first and last second that can be shown. `last_s` is the right edge."""
        raise NotImplementedError

    def snap_to_point(self, x: float) -> float:
        """Return the time of the curve point closest to `x`.

        The legends show the values at this time, and a click goes to it, so that both agree.
        """
        return x

    def headline_time(self, name: str) -> str:
        """Return a short text for the time of a chart's values while the pointer is not over a chart."""
        return "current"

    def time_text(self, x: float) -> str:
        return self.clock_text(x)

    def clock_text(self, x: float) -> str:
        return next(iter(self.panels.values())).clock_text(x)

    # Methods that the view calls

    @property
    def is_following(self) -> bool:
        return self._fixed_range is None

    @property
    def is_static(self) -> bool:
        """Whether the shown time does not advance, so that no later `refresh` would draw the remaining charts."""
        timeline = self.session.timeline
        return timeline.is_paused if timeline.player is None else not timeline.player.is_playing

    def refresh(self) -> None:
        """Draw the next `charts_per_refresh` charts, or all visible ones if the shown time does not advance."""
        if self.is_static:
            self.refresh_visible()
            return
        span = self._prepare()
        num_panels = min(self.charts_per_refresh, len(self.shown))
        self._next_panel = (self._next_panel + num_panels) % len(self.shown) if self.shown else 0
        self._draw_panels(
            [
                name
                for name in (self.shown * 2)[self._next_panel : self._next_panel + num_panels]
                if self._is_panel_visible(name)
            ],
            span,
        )

    def refresh_all(self) -> None:
        span = self._prepare()
        self._draw_panels(self.shown, span)

    def refresh_visible(self) -> None:
        span = self._prepare()
        self._draw_panels([name for name in self.shown if self._is_panel_visible(name)], span)

    def show_last(self, seconds: float) -> None:
        """Show the last `seconds` (`math.inf` for everything) and follow the present."""
        self.range_s = seconds
        self.follow()

    def follow(self) -> None:
        self._set_fixed_range(None)
        self.refresh_all()

    def show_fixed(self, first_s: float, last_s: float) -> None:
        self._set_fixed_range((first_s, last_s))
        self.refresh_all()

    def show_span(self, span: TimeSpan) -> None:
        self.show_fixed(*self._to_seconds(span))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.link.apply_theme(theme)

    def restore_settings(self, settings: QSettings) -> None:
        range_name = str(settings.value(self.range_setting, ""))
        if range_name in RANGES_S:
            self.range_s = RANGES_S[range_name]
            self.bar.show_range(self.range_s)

    def save_settings(self, settings: QSettings) -> None:
        settings.setValue(self.range_setting, next(name for name, s in RANGES_S.items() if s == self.range_s))

    def _is_panel_visible(self, name: str) -> bool:
        """Whether any part of a chart is visible.

        The plot's viewport is checked too. The panel's own `visibleRegion` excludes what opaque children cover, so it
        is empty if only the plot of a partly scrolled chart is visible.
        """
        panel = self.panels[name]
        return any(not part.visibleRegion().isEmpty() for part in (panel, panel.plot.viewport()))

    def add_panels(self, panels: Mapping[str, ChartPanel]) -> None:
        super().add_panels(panels)
        for panel in panels.values():
            panel.show_cursor(self.hover_s)
            panel.hovered.connect(self.show_values_at)
            panel.range_dragged.connect(self._on_dragged)
            panel.chosen.connect(lambda x: self._go_to(self.snap_to_point(x)))
            panel.peak_chosen.connect(self._go_to)
            panel.fit_requested.connect(self._on_follow_chosen)
            panel.mark_chosen.connect(self.session.timeline.show_event)

    def set_scroll_area(self, area: QScrollArea | None) -> None:
        super().set_scroll_area(area)
        if area is not None:
            # drop the scroll value, which `start` would take as milliseconds
            area.verticalScrollBar().valueChanged.connect(lambda _: self._scroll_timer.start(0))

    def show_values_at(self, x: float | None) -> None:
        """Show the values at time `x` in all charts, or the newest values if it is None."""
        x = None if x is None else self.snap_to_point(x)
        self.hover_s = x
        for panel in self.panels.values():
            panel.show_cursor(x)
        self.bar.show_time(*([] if x is None else [self.time_text(x), self.clock_text(x)]))
        self._show_values(self.shown)

    def _draw_panels(self, names: Sequence[str], span: tuple[float, float]) -> None:
        if not names:
            return
        first_s, last_s = span
        self.fetch_data(names, first_s, last_s)
        cursor_s = self.session.timeline.shown_monotonic_ns / 1e9
        is_behind = first_s <= cursor_s < last_s - self.max_lag_s
        stops = stop_bands(self.session, first_s, last_s)
        for name in names:
            panel = self.panels[name]
            panel.show_time(first_s, last_s, last_s if self.is_following and not is_behind else None)
            panel.show_session_cursor(cursor_s if is_behind else None)
            self.draw_curves(name, first_s, last_s)
            panel.show_stops(stops)
            panel.finish_layout()
        self._value_time_s = cursor_s if is_behind else last_s
        self._show_values(names)

    def _prepare(self) -> tuple[float, float]:
        span = self._span()
        self.show_panels(self.charts_with_content(*span))
        return span

    def _span(self) -> tuple[float, float]:
        if self._fixed_range is not None:
            return self._fixed_range
        last_s = self.end_s()
        return self.available_range(last_s) if math.isinf(self.range_s) else (last_s - self.range_s, last_s)

    def _show_values(self, names: Sequence[str]) -> None:
        is_read = self.hover_s is not None
        at_s = self._value_time_s if self.hover_s is None else self.hover_s
        for name in names:
            panel = self.panels[name]
            time_text = panel.clock_text(at_s) if is_read else self.headline_time(name)
            panel.legend.set_values(self.texts_at(name, at_s), time_text, is_read=is_read)

    def _set_fixed_range(self, fixed: tuple[float, float] | None) -> None:
        self._fixed_range = fixed
        self.bar.set_following(fixed is None)
        if fixed is None:
            self.bar.show_range(self.range_s)
        else:
            self.bar.ranges.clear()

    def _on_linked(self, span: TimeSpan | None) -> None:
        """Show the time range of the linked views, or follow the present if it is None. Charts off screen are drawn
        later.
        """
        self._set_fixed_range(None if span is None else self._to_seconds(span))
        if is_on_screen(self):
            self.refresh_all()

    def _to_seconds(self, span: TimeSpan) -> tuple[float, float]:
        offset_ns = self.session.history.wall_ns(0)
        return (span.begin_ns - offset_ns) / 1e9, (span.end_ns - offset_ns) / 1e9

    def _on_dragged(self, first_s: float, last_s: float) -> None:
        self.show_fixed(first_s, last_s)
        offset_ns = self.session.history.wall_ns(0)
        self.link.choose(TimeSpan(round(first_s * 1e9) + offset_ns, round(last_s * 1e9) + offset_ns))

    def _on_length_chosen(self, seconds: float) -> None:
        self.show_last(seconds)
        self.link.choose(None)

    def _on_follow_chosen(self) -> None:
        self.follow()
        self.link.choose(None)

    def _go_to(self, x: float) -> None:
        self.session.timeline.go_to(round(x * 1e9) + self.session.history.wall_ns(0))


class ChartedView(View):
    charts: ChartStack

    def restore_settings(self, settings: QSettings) -> None:
        self.charts.restore_settings(settings)

    def save_settings(self, settings: QSettings) -> None:
        self.charts.save_settings(settings)

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        self.charts.show_span(TimeSpan(begin_ns, end_ns))

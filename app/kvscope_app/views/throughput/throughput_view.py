"""View of tokens, requests, KV usage and latencies over a common time axis.

Decides when the charts are drawn and from which data; `throughput.panels` defines what each panel draws.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.session.history import BIN_NS, MAX_SILENCE_NS, HistoryWindow
from kvscope_app.session.overview_window import known_columns_of, overview_span_ns, overview_window
from kvscope_app.session.recent_figures import RECENT_S
from kvscope_app.session.session import Session
from kvscope_app.setting_names import THROUGHPUT_RANGE
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, scroll_area
from kvscope_app.views.chart.axes import ago_text
from kvscope_app.views.chart.chart_stack import MIN_RANGE_S, ChartedView, ChartStack
from kvscope_app.views.chart.curves import gaps, nearest
from kvscope_app.views.chart.panel import PlotMark
from kvscope_app.views.throughput.panels import (
    MAX_MARKED_EVENTS,
    PANELS,
    PEAK_COLUMNS,
    DrawnPanel,
    columns_of,
    draw,
    headline,
    is_constant,
    is_current,
    marks_of_overview,
    peaks_of,
    preemption_marks,
    values_at,
)
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.summaries.session_overview import SessionOverview

EMPTY_TEXT = "Waiting for the engine's first report."
_SILENT_REFRESH_S = 3.0
"""Seconds between advances of the time axis while the engine sends no data."""
_FLAT_REFRESH_S = 9.0
"""Seconds between advances of the time axis while the engine sends no data and all curves are constant, because
advancing does not change how they look.
"""
_IDLE_INTERVAL_S = 1.0
"""Interval in seconds between two refreshes from which on the engine counts as idle, because only heartbeats arrive.

All panels are then drawn together, because otherwise each would show another time.
"""


_HEADLINE_INTERVAL_S: Final = 0.5
"""Seconds between computations of headlines that cover the last seconds. Headlines with current values are updated on
each refresh.
"""


class ThroughputView(ChartedView):
    title: ClassVar[str] = "Throughput"
    object_name: ClassVar[str] = "throughput"
    refresh_hz: ClassVar[float] = 30.0
    charts: ThroughputCharts

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.charts = ThroughputCharts(session)
        self._lay_out()

    def refresh(self) -> None:
        self.charts.refresh()

    def draw_all(self) -> None:
        self.charts.refresh_all()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.charts.apply_theme(theme)

    def _lay_out(self) -> None:
        self.charts.setContentsMargins(2, 2, 6, 6)
        self.charts.set_scroll_area(scroll := scroll_area(self.charts))
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        pages = QWidget()
        stack = QStackedLayout(pages)
        stack.addWidget(empty_state(EMPTY_TEXT))
        stack.addWidget(scroll)
        self.charts.has_data.connect(lambda: stack.setCurrentIndex(1))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addWidget(self.charts.bar)
        layout.addWidget(pages, 1)


class ThroughputCharts(ChartStack):
    """Throughput charts. Each refresh draws one of the charts in turn, so that all of them advance several times per
    second.

    While the engine is idle, refreshes are rare, and all visible charts are drawn together.
    """

    has_data = Signal()

    range_setting: ClassVar[str] = THROUGHPUT_RANGE
    max_lag_s: ClassVar[float] = 0.5

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._is_constant = False
        self._refreshed_s, self._all_drawn_s, self._headlines_s = 0.0, 0.0, 0.0
        self._overview_version: tuple[SessionOverview, int] | None = None
        self._overview_known: set[str] = set()
        self.drawn: dict[str, DrawnPanel] = {}
        self._window: HistoryWindow | None = None
        self._gaps: Sequence[tuple[float, float]] = ()
        self._silent_state: SourceState | None = None
        self._silent_s = 0.0
        self.show_panels([spec.key for spec in PANELS if not spec.needs])
        session.status_changed.connect(self._on_status)
        session.overview_changed.connect(self._on_overview)

    def show_panels(self, names: Collection[str]) -> None:
        """Create missing panels (about 10 ms each, so not before they are needed) and show all of `names`."""
        self.add_panels({spec.key: spec.make_panel() for spec in PANELS if spec.key in {*names} - self.panels.keys()})
        super().show_panels(names)

    def refresh(self) -> None:
        now_s = time.monotonic()
        previous_s, self._refreshed_s = self._refreshed_s, now_s
        if now_s - previous_s < _IDLE_INTERVAL_S or self.is_static:
            super().refresh()
        elif now_s - self._all_drawn_s >= (_FLAT_REFRESH_S if self._is_constant else _SILENT_REFRESH_S):
            self._all_drawn_s = now_s
            self.refresh_visible()
        is_due = now_s - self._headlines_s >= _HEADLINE_INTERVAL_S
        self._headlines_s = now_s if is_due else self._headlines_s
        # each call draws the curves of one chart only
        self._show_values([name for name in self.shown if is_due or is_current(name)])

    def charts_with_content(self, first_s: float, last_s: float) -> Sequence[str]:
        if self.session.history.epoch is None:
            return ()
        self.has_data.emit()
        known_columns = self.session.history.known_columns | self._known_in_overview()
        return [spec.key for spec in PANELS if not spec.needs or spec.needs in known_columns]

    def fetch_data(self, names: Sequence[str], first_s: float, last_s: float) -> None:
        window = self._window_of({*columns_of(names), "preemptions"}, first_s, last_s)
        self._window, self._is_constant = window, is_constant(window)
        is_known = np.isfinite(window.columns["num_running"])
        self._gaps = gaps(window.time_s + window.end_ns / 1e9, is_known, max(MAX_SILENCE_NS, 3 * window.bin_ns) / 1e9)

    def draw_curves(self, name: str, first_s: float, last_s: float) -> None:
        panel, window = self.panels[name], self._window
        assert window is not None, "fetch_data was called"
        self.drawn[name] = draw(panel, name, window, self.session)
        panel.show_gaps(self._gaps)
        # The second that contains the cursor is drawn to its end, so its maximum counts as visible.
        until_s = last_s + window.bin_ns / 1e9 if self.is_following and window.is_complete else last_s
        panel.show_peaks(peaks_of(name, self.drawn[name], window, (first_s, until_s), panel.clock_text))
        if name == "requests":
            panel.show_marks(self._marks(window, first_s, last_s))

    def texts_at(self, name: str, at_s: float) -> Mapping[str, str]:
        if self.hover_s is None:
            return headline(name, self.session)
        return values_at(name, self.drawn[name], at_s) if name in self.drawn else {}

    def snap_to_point(self, x: float) -> float:
        window = self._window
        return x if window is None else nearest(window.time_s + window.end_ns / 1e9, x)

    def headline_time(self, name: str) -> str:
        return super().headline_time(name) if is_current(name) else f"last {RECENT_S} s"

    def end_s(self) -> float:
        """Return the end of the last complete bin. An incomplete bin would look like a drop."""
        return (self.session.timeline.shown_monotonic_ns // BIN_NS) * BIN_NS / 1e9

    def available_range(self, last_s: float) -> tuple[float, float]:
        span_ns = overview_span_ns(self.session.overview)
        if span_ns is not None:
            wall_ns = self.session.history.wall_ns(0)
            begin_s, end_s = ((at_ns - wall_ns) / 1e9 for at_ns in span_ns)
            last_s = max(last_s, end_s)
            return min(begin_s, last_s - MIN_RANGE_S), last_s
        return last_s - self.session.history.max_seconds, last_s

    def time_text(self, x: float) -> str:
        ago_s = self.session.timeline.shown_monotonic_ns / 1e9 - x
        return f"{super().time_text(x)}  ({ago_text(round(max(ago_s, 0.0), 1))})"

    def show_values_at(self, x: float | None) -> None:
        if self._is_constant and self.is_following and self.hover_s is None and x is not None:
            self.refresh_all()  # it may be slightly out of date
        super().show_values_at(x)

    def _window_of(self, names: set[str], first_s: float, last_s: float) -> HistoryWindow:
        """Return the data to draw, from the overview for recordings and for ranges beyond the history.

        The history of a recording contains only the parts that were played, so curves from it would depend on playback.
        """
        history, shown_ns = self.session.history, self.session.timeline.shown_monotonic_ns
        if self.session.timeline.player is not None or self._reaches_further(first_s, last_s):
            wall_ns = history.wall_ns(0)
            peaks = {peak for name in names & PEAK_COLUMNS.keys() for peak in PEAK_COLUMNS[name]}
            window = overview_window(
                self.session.overview, wall_ns, int(first_s * 1e9), int(last_s * 1e9), names | peaks
            )
            if window is not None:
                return window
        end_ns = shown_ns if self.is_following else min(int(last_s * 1e9), shown_ns)
        return history.window(end_ns / 1e9 - first_s, end_ns, names - {"preemptions"})

    def _reaches_further(self, first_s: float, last_s: float) -> bool:
        history = self.session.history
        newest_s = history.ring.newest * BIN_NS / 1e9
        return last_s - first_s > history.max_seconds or first_s < newest_s - history.max_seconds

    def _marks(self, window: HistoryWindow, first_s: float, last_s: float) -> list[PlotMark]:
        history, overview = self.session.history, self.session.overview
        wall_ns, first_ns, last_ns = history.wall_ns(0), int(first_s * 1e9), int(last_s * 1e9)
        if window.bin_ns == BIN_NS:
            entries = history.events.between(first_ns, last_ns, "preempted", MAX_MARKED_EVENTS)
            return preemption_marks(map(history.with_wall_time, entries), wall_ns, first_s, last_s)
        indices = overview.events.find(first_ns + wall_ns, last_ns + wall_ns, ("preempted",)).tolist()
        if overview.events.num_forgotten or not 0 < len(indices) <= MAX_MARKED_EVENTS:
            return marks_of_overview(window, first_s, last_s)
        return preemption_marks((overview.events[index] for index in indices), wall_ns, first_s, last_s)

    def _known_in_overview(self) -> set[str]:
        """Return the optional columns (those that only some sources report) for which the overview has data.

        They are known before the view shows the data, so that a panel of a recording or of a whole session is present
        from the start.
        """
        uses_overview = self.session.timeline.player is not None or math.isinf(self.range_s)
        if not uses_overview or not len(self.session.overview):
            return set()
        version = (self.session.overview, self.session.overview.version)
        if version != self._overview_version:
            self._overview_version = version
            self._overview_known = known_columns_of(self.session.overview)
        return self._overview_known

    def _on_status(self) -> None:
        """Advance the time axis while the engine is silent, so that outdated values leave the charts."""
        timeline = self.session.timeline
        is_static = timeline.is_paused and timeline.player is None
        if not self.is_following or is_static or not is_on_screen(self):
            return
        state, now_s = self.session.status.state, time.monotonic()
        is_silent = state in (SourceState.ENDED, SourceState.STALE, SourceState.CONNECTING)
        is_due = state is not self._silent_state or now_s - self._silent_s >= _SILENT_REFRESH_S
        if is_silent and is_due:
            self._silent_state, self._silent_s = state, now_s
            self.refresh_all()

    def _on_overview(self) -> None:
        """Redraw the charts when more of a recording's overview has been read, which triggers no other redraw."""
        if self.session.timeline.is_file and is_on_screen(self):
            self.refresh_visible()

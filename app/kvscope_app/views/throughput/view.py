"""Throughput: tokens, requests, KV usage and latencies over one time axis.

Owns which time is shown and how the panels are laid out; what a panel draws is in `throughput_panels`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from PySide6.QtCore import QEvent, QSettings, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QScrollArea, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.look.makers import empty_state
from kvscope_app.look.theme import Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.session.history import BIN_NS, MAX_SILENCE_NS, HistoryWindow
from kvscope_app.session.overview_window import known_in, overview_span_ns, overview_window
from kvscope_app.session.session import Session
from kvscope_app.session.shown_stops import stop_bands
from kvscope_app.setting_names import THROUGHPUT_RANGE
from kvscope_app.views.base import View
from kvscope_app.views.chart.axes import ago_text
from kvscope_app.views.chart.curves import gaps
from kvscope_app.views.chart.panel import ChartPanel
from kvscope_app.views.chart.time_bar import DEFAULT_RANGE, RANGES_S, TimeBar
from kvscope_app.views.in_sight import in_sight
from kvscope_app.views.throughput.panels import (
    PANELS,
    Drawn,
    columns_of,
    draw,
    is_level,
    marks_of_overview,
    preemption_marks,
    values_at,
)
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.summaries.session_overview import SessionOverview

EMPTY_TEXT = "Waiting for the engine's first report."
SHORTEST_S = min(RANGES_S.values())
_PANEL_MIN_WIDTH = 310
_SILENT_EVERY_S = 3.0
"""How often curves move on where there is no engine."""
_FLAT_EVERY_S = 9.0
"""The same while all of them are level: moved on, they look as before."""
_AT_LEISURE_S = 1.0
"""Calls that come more rarely are signs of life: then all panels move on together, or each would show another time."""


class ThroughputView(View):
    """Six plots, and more where the source tells more. One of them is drawn each call, so that every plot moves
    several times a second and no call is long; of calls that come rarely, every other draws all."""

    title: ClassVar[str] = "Throughput"
    object_name: ClassVar[str] = "throughput"
    refresh_hz: ClassVar[float] = 30.0

    _num_columns = 0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.bar = TimeBar(is_file=session.is_file)
        self.panels = {spec.key: spec.make_panel() for spec in PANELS}
        self._range_s = RANGES_S[DEFAULT_RANGE]
        self._fixed: tuple[float, float] | None = None
        """First and last second shown while not following."""
        self._hover_s: float | None = None
        self._is_level = False
        """Whether the curves that were drawn last look the same as time goes on."""
        self._turn = 0
        self._called_s, self._all_drawn_s = 0.0, 0.0
        self._shown = [spec.key for spec in PANELS if not spec.needs]
        """Panels whose columns the source has."""
        self._place = (0, 0)
        """Of a recording: where it was at the last look, and what of it was taken."""
        self._overview_version: tuple[SessionOverview, int] | None = None
        self._overview_known: set[str] = set()
        self._drawn: dict[str, Drawn] = {}
        self._silent_state: SourceState | None = None
        self._silent_s = 0.0
        self._lay_out()
        self._connect()

    def recall(self, settings: QSettings) -> None:
        kept = str(settings.value(THROUGHPUT_RANGE, ""))
        if kept in RANGES_S:
            self._range_s = RANGES_S[kept]
            self.bar.show_range(self._range_s)

    def remember(self, settings: QSettings) -> None:
        kept = next(name for name, seconds in RANGES_S.items() if seconds == self._range_s)
        settings.setValue(THROUGHPUT_RANGE, kept)

    def refresh(self) -> None:
        """Draw the next panel."""
        if self.session.history.epoch is None:
            return
        self._stack.setCurrentIndex(1)
        self._show_known()
        now_s = time.monotonic()
        before_s, self._called_s = self._called_s, now_s
        if now_s - before_s >= _AT_LEISURE_S:
            self._draw_at_leisure(now_s)
            return
        self._turn = (self._turn + 1) % len(self._shown)
        key = self._shown[self._turn]
        if self._is_in_sight(key):
            self._draw([key])

    def refresh_all(self) -> None:
        """Draw every panel now: the person changed what is shown."""
        if self.session.history.epoch is not None:
            self._stack.setCurrentIndex(1)
            self._show_known()
            self._draw(self._shown)

    def draw_all(self) -> None:
        self.refresh_all()

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        offset_ns = self.session.history.wall_ns(0)
        self.look_back((begin_ns - offset_ns) / 1e9, (end_ns - offset_ns) / 1e9)

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        for panel in self.panels.values():
            panel.apply_theme(theme)

    @property
    def is_following(self) -> bool:
        """Whether the right edge is the present."""
        return self._fixed is None

    def show_last(self, seconds: float) -> None:
        """Show the last `seconds` and follow."""
        self._range_s = seconds
        self.bar.show_range(seconds)
        self.follow()

    def follow(self) -> None:
        """Let the right edge be the present."""
        self._fixed = None
        self.bar.set_following(True)
        self.refresh_all()

    def look_back(self, first_s: float, last_s: float) -> None:
        """Stand still on a stretch of time, in seconds of the monotonic clock."""
        self._fixed = (first_s, last_s)
        self.bar.set_following(False)
        self.refresh_all()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._reflow()

    def _draw_at_leisure(self, now_s: float) -> None:
        if now_s - self._all_drawn_s >= (_FLAT_EVERY_S if self._is_level else _SILENT_EVERY_S):
            self._all_drawn_s = now_s
            self._draw([key for key in self._shown if self._is_in_sight(key)])

    def _is_in_sight(self, key: str) -> bool:
        """And not scrolled away."""
        return not self.panels[key].visibleRegion().isEmpty()

    def _draw(self, keys: list[str]) -> None:
        window, first_s, last_s = self._window(columns_of(keys))
        self._is_level = is_level(window)
        place_s = self.session.shown_until_ns / 1e9
        is_behind = first_s <= place_s < last_s - 0.5
        now_s = last_s if self.is_following and not is_behind else None
        known = np.isfinite(window.columns["num_running"])
        silent = gaps(window.time_s + window.end_ns / 1e9, known, max(MAX_SILENCE_NS, 3 * window.bin_ns) / 1e9)
        stopped = stop_bands(self.session, first_s, last_s)
        for key in keys:
            panel = self.panels[key]
            panel.show_time(first_s, last_s, now_s)
            self._drawn[key] = draw(panel, key, window, self.session, last_s - first_s)
            panel.show_gaps(silent)
            panel.show_stops(stopped)
            panel.show_place(place_s if is_behind else None)
            if key == "requests":
                in_seconds = window.bin_ns != BIN_NS
                told = marks_of_overview(window, first_s, last_s) if in_seconds else None
                panel.show_marks(preemption_marks(self.session.history, first_s, last_s) if told is None else told)
            panel.settle()
        self._show_values(keys)

    def _window(self, names: Iterable[str]) -> tuple[HistoryWindow, float, float]:
        """What is to be drawn, and the first and last second shown. Before the history begins the overview is drawn."""
        shown_ns = self.session.shown_until_ns
        # The bin in progress is not drawn: it would look like a drop.
        last_s = (shown_ns // BIN_NS) * BIN_NS / 1e9
        if self._fixed is not None:
            first_s, last_s = self._fixed
        elif math.isinf(self._range_s):
            first_s, last_s = self._whole(last_s)
        else:
            first_s = last_s - self._range_s
        if self._reaches_further(first_s, last_s):
            wall_ns = self.session.history.wall_ns(0)
            overview = self.session.overview
            window = overview_window(overview, wall_ns, int(first_s * 1e9), int(last_s * 1e9), {*names, "preemptions"})
            if window is not None:
                return window, first_s, last_s
        end_ns = shown_ns if self._fixed is None else min(int(last_s * 1e9), shown_ns)
        return self.session.history.window(end_ns / 1e9 - first_s, end_ns, names), first_s, last_s

    def _whole(self, last_s: float) -> tuple[float, float]:
        """All there is, and never less than the shortest range."""
        span_ns = overview_span_ns(self.session.overview)
        if span_ns is not None:
            wall_ns = self.session.history.wall_ns(0)
            begin_s, end_s = ((at_ns - wall_ns) / 1e9 for at_ns in span_ns)
            last_s = max(last_s, end_s)
            return min(begin_s, last_s - SHORTEST_S), last_s
        return last_s - self.session.history.max_seconds, last_s

    def _reaches_further(self, first_s: float, last_s: float) -> bool:
        """Whether what is shown is more, or earlier or later, than the history has."""
        history = self.session.history
        newest_s = history.ring.newest * BIN_NS / 1e9
        is_late = self.session.is_file and last_s > self.session.shown_until_ns / 1e9 + SHORTEST_S
        return last_s - first_s > history.max_seconds or first_s < newest_s - history.max_seconds or is_late

    def _show_values(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._drawn:
                drawn = self._drawn[key]
                at = drawn.latest if self._hover_s is None else values_at(key, drawn, self._hover_s)
                self.panels[key].legend.set_values(at)

    def _on_status(self) -> None:
        """Without an engine nothing changes but the time: curves move on, and their values go."""
        stands_still = self.session.paused and self.session.player is None
        if not self.is_following or stands_still or not in_sight(self):
            return
        state, now_s = self.session.status.state, time.monotonic()
        silent = state in (SourceState.ENDED, SourceState.STALE, SourceState.CONNECTING)
        is_time = state is not self._silent_state or now_s - self._silent_s >= _SILENT_EVERY_S
        if (silent and is_time) or self._is_elsewhere():
            self._silent_state, self._silent_s = state, now_s
            self.refresh_all()

    def _on_overview(self) -> None:
        """A recording's overview comes a part at a time, and nothing else happens there."""
        if self.session.is_file and math.isinf(self._range_s) and in_sight(self):
            self.refresh_all()

    def _is_elsewhere(self) -> bool:
        """Whether a recording stands still somewhere else than at the last look: not every panel is drawn yet."""
        player = self.session.player
        if player is None or player.is_playing:
            return False
        before, self._place = self._place, (player.now_ns, player.taken_ns)
        return before != self._place

    def _on_hover(self, x: float | None) -> None:
        if self._is_level and self.is_following and self._hover_s is None and x is not None:
            self.refresh_all()  # it may stand a little behind
        self._hover_s = x
        for panel in self.panels.values():
            panel.show_cursor(x)
        self.bar.time.setText("" if x is None else self._time_text(x))
        self._show_values(list(self.panels))

    def _time_text(self, x: float) -> str:
        ago_s = self.session.shown_until_ns / 1e9 - x
        return f"{self.panels['decode'].clock_text(x)}  ({ago_text(round(max(ago_s, 0.0), 1))})"

    def _connect(self) -> None:
        self.bar.range_chosen.connect(self.show_last)
        self.bar.live_requested.connect(self.follow)
        self.session.status_changed.connect(self._on_status)
        self.session.overview_changed.connect(self._on_overview)
        for panel in self.panels.values():
            panel.hovered.connect(self._on_hover)
            panel.range_dragged.connect(self.look_back)
            panel.chosen.connect(self._go_to)
            panel.fit_wanted.connect(self.follow)
            panel.mark_chosen.connect(self.session.show_event)

    def _lay_out(self) -> None:
        body = QWidget()
        self._grid = QGridLayout(body)
        scroll = QScrollArea()
        for panel in self.panels.values():
            panel.setParent(body)  # also those that are not shown yet
            panel.plot.area = scroll
        self._grid.setContentsMargins(2, 2, 6, 6)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(8)
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        pages = QWidget()
        self._stack = QStackedLayout(pages)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(scroll)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addWidget(self.bar)
        layout.addWidget(pages, 1)
        self._reflow()

    def _show_known(self) -> None:
        """Panels come when the source first tells what they show; those of an engine of before go."""
        known = self.session.history.known | self._known_in_overview()
        shown = [spec.key for spec in PANELS if not spec.needs or spec.needs in known]
        if shown != self._shown:
            self._shown = shown
            self._num_columns = 0
            self._reflow()

    def _known_in_overview(self) -> set[str]:
        """A panel of a whole session is there from its start on, where its time comes later."""
        if not math.isinf(self._range_s) or not len(self.session.overview):
            return set()
        version = (self.session.overview, self.session.overview.version)
        if version != self._overview_version:
            self._overview_version = version
            self._overview_known = known_in(self.session.overview)
        return self._overview_known

    def _go_to(self, x: float) -> None:
        """There, where there is something to go to."""
        self.session.go_to(round(x * 1e9) + self.session.history.wall_ns(0))

    def changeEvent(self, event: QEvent) -> None:
        """Fewer panels of larger text have room beside each other."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._num_columns:
            self._reflow()

    def _reflow(self) -> None:
        """One, two or three panels side by side, as many as the width takes."""
        columns = max(1, min(3, self.width() // scaled(_PANEL_MIN_WIDTH)))
        if columns == self._num_columns:
            return
        self._num_columns = columns
        panels: list[ChartPanel] = [self.panels[key] for key in self._shown]
        for key, panel in self.panels.items():
            self._grid.removeWidget(panel)
            panel.setVisible(key in self._shown)
        for index, panel in enumerate(panels):
            self._grid.addWidget(panel, index // columns, index % columns)
            panel.show_time_labels(index >= len(panels) - columns)
        self._grid.activate()  # a paint may come before Qt does so: all panels would lie on each other

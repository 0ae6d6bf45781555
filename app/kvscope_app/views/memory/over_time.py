"""How the memory went over the session: bytes of the KV pool, of the lower tiers, and of the device, from the overview.

Owns the range of time that is shown. Where there is no overview it shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from PySide6.QtCore import QSettings, Signal
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget

from kvscope_app.look.makers import label
from kvscope_app.look.number_text import NOTHING, num_bytes
from kvscope_app.look.theme import Theme
from kvscope_app.session.history import HistoryWindow
from kvscope_app.session.overview_window import overview_span_ns, overview_window
from kvscope_app.session.session import Session
from kvscope_app.session.shown_stops import stop_bands
from kvscope_app.setting_names import MEMORY_RANGE
from kvscope_app.views.chart.curves import FloatArray, gaps
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec
from kvscope_app.views.chart.time_bar import RANGES_S, TimeBar

_GAP_S: Final = 3.0
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_HEIGHT: Final = 118
_SHORTEST_S: Final = min(RANGES_S.values())


@dataclass(frozen=True, slots=True)
class _Chart:
    """Curves of columns of the overview. The first lies on top of the others where they are filled."""

    title: str
    curves: tuple[CurveSpec, ...]
    is_blocks: bool
    """Whether the columns count blocks."""
    tip: str


_CHARTS: Final = (
    _Chart(
        "KV pool",
        (
            CurveSpec("cached_blocks", "cached", "block_cached", filled=True),
            CurveSpec("active_blocks", "in use", "block_active", filled=True),
        ),
        True,
        "Bytes of the pool's blocks; cached is stacked on in use",
    ),
    _Chart(
        "Lower tiers",
        (CurveSpec("host_blocks", "host", "block_host"), CurveSpec("disk_blocks", "disk", "block_disk")),
        True,
        "Bytes used in host memory and disk tiers",
    ),
    _Chart(
        "Device memory",
        (CurveSpec("memory_used_bytes", "all processes", 7), CurveSpec("process_bytes", "by the engine", 0)),
        False,
        "As reported by the driver or system",
    ),
)
_COLUMNS: Final = frozenset(curve.name for chart in _CHARTS for curve in chart.curves)


class _Scale:
    """The unit of an axis: it ends on a round number of that."""

    def __init__(self) -> None:
        self._power = 0

    @property
    def unit_bytes(self) -> int:
        """1, 1,024, …"""
        return 1 << 10 * self._power

    def fit(self, highest: float) -> None:
        """To the largest of the values: `1000 MiB` would have no room."""
        self._power = min(int(math.log2(2 * highest) // 10), len(_UNITS) - 1) if highest >= 1 else 0

    def text(self, value: float) -> str:
        """`1.5 GiB`."""
        return f"{value:g} {_UNITS[self._power]}" if value else "0"


class MemoryOverTime(QWidget):
    """A bar with ranges, and a chart below another, each where something of it was told."""

    chosen = Signal(float)
    """A second of the monotonic clock that was clicked."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.bar = TimeBar(is_file=session.is_file, inset=False)
        self.range_s = RANGES_S["10 min"]
        self.bar.show_range(self.range_s)
        self._fixed: tuple[float, float] | None = None
        self._scales = [_Scale() for _ in _CHARTS]
        self.panels = [
            ChartPanel(chart.title, chart.curves, scale.text)
            for chart, scale in zip(_CHARTS, self._scales, strict=True)
        ]
        self._drawn: list[tuple[FloatArray, dict[str, FloatArray]]] = [(np.empty(0), {}) for _ in _CHARTS]
        self._hover_s: float | None = None
        self._turn = 0
        self._lay_out()
        self._connect()
        self.hide()

    def refresh(self) -> None:
        """Draw the next chart: a call stays short however long the session is."""
        self._turn = (self._turn + 1) % len(self.panels)
        self._refresh([self._turn])

    def refresh_all(self) -> None:
        """Draw every chart now."""
        self._refresh(range(len(self.panels)))

    def apply_theme(self, theme: Theme) -> None:
        """Take its colours."""
        for panel in self.panels:
            panel.apply_theme(theme)

    def lie_in(self, area: QScrollArea) -> None:
        """The wheel over the charts is for `area`."""
        for panel in self.panels:
            panel.plot.area = area

    def show_last(self, seconds: float) -> None:
        """Show the last `seconds`, infinite for all, and follow."""
        self.range_s, self._fixed = seconds, None
        self.bar.show_range(seconds)
        self.bar.set_following(True)
        self.refresh_all()

    def look_back(self, first_s: float, last_s: float) -> None:
        """Stand still on a stretch of time, in seconds of the monotonic clock."""
        self._fixed = (first_s, last_s)
        self.bar.set_following(False)
        self.refresh_all()

    def recall(self, settings: QSettings) -> None:
        """The range of last time."""
        kept = str(settings.value(MEMORY_RANGE, ""))
        if kept in RANGES_S:
            self.range_s = RANGES_S[kept]
            self.bar.show_range(self.range_s)

    def remember(self, settings: QSettings) -> None:
        """The range, for the next time."""
        settings.setValue(MEMORY_RANGE, next(name for name, length_s in RANGES_S.items() if length_s == self.range_s))

    def _refresh(self, which: Iterable[int]) -> None:
        first_s, last_s = self._span()
        session = self._session
        wall_ns = session.history.wall_ns(0)
        window = overview_window(session.overview, wall_ns, int(first_s * 1e9), int(last_s * 1e9), _COLUMNS)
        self.setVisible(window is not None)
        if window is None or self.visibleRegion().isEmpty():
            return
        place_s = session.shown_until_ns / 1e9
        is_behind = first_s <= place_s < last_s - 1.5
        for index in which:
            panel, values = self.panels[index], self._values(_CHARTS[index], window)
            panel.setVisible(bool(values))
            if values:
                panel.show_time(first_s, last_s, last_s if self._fixed is None and not is_behind else None)
                panel.show_place(place_s if is_behind else None)
                self._draw(index, window, values)
        self._show_values(place_s if is_behind else last_s)

    def _span(self) -> tuple[float, float]:
        if self._fixed is not None:
            return self._fixed
        last_s = float(math.ceil(self._session.shown_until_ns / 1e9))  # charts drawn one after another show one time
        span_ns = overview_span_ns(self._session.overview)
        if not math.isinf(self.range_s) or span_ns is None:
            return last_s - min(self.range_s, 600.0), last_s
        wall_ns = self._session.history.wall_ns(0)
        begin_s, end_s = ((at_ns - wall_ns) / 1e9 for at_ns in span_ns)
        last_s = max(end_s, last_s)
        return min(begin_s, last_s - _SHORTEST_S), last_s

    def _values(self, chart: _Chart, window: HistoryWindow) -> dict[str, FloatArray]:
        """In bytes; nothing where nothing was told of it."""
        hello = self._session.mirror.hello
        factor = (hello.cache.block_bytes if hello is not None else 0) if chart.is_blocks else 1
        values = {curve.name: window.columns[curve.name] * factor for curve in chart.curves}
        told = any(np.nanmax(column, initial=0.0) > 0 for column in values.values())
        return values if told else {}

    def _draw(self, index: int, window: HistoryWindow, values: dict[str, FloatArray]) -> None:
        panel = self.panels[index]
        time_s = window.time_s + window.end_ns / 1e9
        phase = int(window.end_ns // window.bin_ns) - time_s.size + 1
        scale = self._scales[index]
        scale.fit(max(float(np.nanmax(column, initial=0.0)) for column in values.values()))
        highest = 0.0
        below = np.zeros(time_s.size)
        for curve in reversed(panel.curves):
            below = below + values[curve.name] if curve.filled else values[curve.name]
            highest = max(highest, panel.show_curve(curve.name, time_s, below / scale.unit_bytes, phase))
        panel.fit(highest)
        known = np.isfinite(window.columns["active_blocks"])
        panel.show_gaps(gaps(time_s, known, _GAP_S))
        panel.show_stops(stop_bands(self._session, *self._span()))
        panel.settle()
        self._drawn[index] = time_s, values

    def _show_values(self, at_s: float) -> None:
        at_s = at_s if self._hover_s is None else self._hover_s
        for panel, (time_s, values) in zip(self.panels, self._drawn, strict=True):
            if time_s.size:
                place = int(np.clip(np.searchsorted(time_s, at_s), 0, time_s.size - 1))
                panel.legend.set_values({name: _bytes(float(column[place])) for name, column in values.items()})

    def _on_hover(self, x: float | None) -> None:
        self._hover_s = x
        for panel in self.panels:
            panel.show_cursor(x)
        self.bar.time.setText("" if x is None else self.panels[0].clock_text(x))
        self._show_values(self._session.shown_until_ns / 1e9)

    def _connect(self) -> None:
        self.bar.range_chosen.connect(self.show_last)
        self.bar.live_requested.connect(lambda: self.show_last(self.range_s))
        for panel in self.panels:
            panel.hovered.connect(self._on_hover)
            panel.range_dragged.connect(self.look_back)
            panel.chosen.connect(self.chosen)
            panel.fit_wanted.connect(lambda: self.show_last(self.range_s))

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(label("Over time", "heading"))
        column.addWidget(self.bar)
        for chart, panel in zip(_CHARTS, self.panels, strict=True):
            panel.legend.explain(chart.tip)
            panel.setFixedHeight(_HEIGHT)
            panel.show_time_labels(True)
            column.addWidget(panel)


def _bytes(value: float) -> str:
    return num_bytes(round(value)) if math.isfinite(value) else NOTHING

"""Charts of memory over the session: bytes of the KV pool, of the lower tiers, and of the device.

The data is from the session's overview; without one, the charts are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from kvscope_app.session.history import HistoryWindow
from kvscope_app.session.overview_window import overview_span_ns, overview_window
from kvscope_app.session.session import Session
from kvscope_app.setting_names import MEMORY_RANGE
from kvscope_app.ui.number_text import NOTHING, num_bytes
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.chart_stack import MIN_RANGE_S, ChartStack
from kvscope_app.views.chart.curves import FloatArray, gaps, nearest, nearest_index
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec
from kvscope_app.views.chart.time_bar import RANGES_S
from kvscope_app.views.memory.memory_breakdown import block_counts
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.mirror.mirror import Mirror

_GAP_PATIENCE_S: Final = 3.0
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_CHART_HEIGHT: Final = 118


@dataclass(frozen=True, slots=True)
class _Chart:
    """Definition of a chart of overview columns. Filled curves are stacked, the first one on top."""

    title: str
    curves: tuple[CurveSpec, ...]
    is_blocks: bool
    """Whether the columns count blocks rather than bytes."""
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
        tuple(
            CurveSpec(f"{TIER_STYLES[tier].short_name}_blocks", TIER_STYLES[tier].short_name, TIER_STYLES[tier].color)
            for tier in (Tier.HOST, Tier.DISK)
        ),
        True,
        "Bytes of blocks in host memory and disk tiers; recurrent states are not counted",
    ),
    _Chart(
        "Device memory",
        (CurveSpec("memory_used_bytes", "all processes", 7), CurveSpec("process_bytes", "by the engine", 0)),
        False,
        "As reported by the driver or system",
    ),
)
_COLUMNS: Final = frozenset(curve.name for chart in _CHARTS for curve in chart.curves)


class _ByteScale:
    def __init__(self) -> None:
        self._power = 0

    @property
    def unit_bytes(self) -> int:
        return 1 << 10 * self._power

    def fit(self, highest: float) -> None:
        self._power = min(int(math.log2(2 * highest) // 10), len(_UNITS) - 1) if highest >= 1 else 0

    def text(self, value: float) -> str:
        """Format `value`, a number of the scale's unit, for example as `1.5 GiB`."""
        return f"{value:g} {_UNITS[self._power]}" if value else "0"


class MemoryOverTime(ChartStack):
    range_setting: ClassVar[str] = MEMORY_RANGE
    default_range: ClassVar[str] = "10 min"
    max_columns: ClassVar[int] = 1

    def __init__(self, session: Session) -> None:
        super().__init__(session, "Over time")
        self.scales = {chart.title: _ByteScale() for chart in _CHARTS}
        self._window: HistoryWindow | None = None
        self._values: dict[str, dict[str, FloatArray]] = {}
        """Bytes of each curve, shape (n,), by chart and curve name. Charts without data are left out."""
        self.set_panels({chart.title: self._make_panel(chart) for chart in _CHARTS})
        self.hide()

    def charts_with_content(self, first_s: float, last_s: float) -> Sequence[str]:
        overview, wall_ns = self.session.overview, self.session.history.wall_ns(0)
        self._window = overview_window(overview, wall_ns, int(first_s * 1e9), int(last_s * 1e9), _COLUMNS)
        self.setVisible(self._window is not None)
        self._values = {} if self._window is None else self._charted_values(self._window)
        return list(self._values)

    def draw_curves(self, name: str, first_s: float, last_s: float) -> None:
        window, values, panel, scale = self._window, self._values[name], self.panels[name], self.scales[name]
        assert window is not None, "charts_with_content found data"
        time_s = window.time_s + window.end_ns / 1e9
        phase = int(window.end_ns // window.bin_ns) - time_s.size + 1
        scale.fit(max(float(np.nanmax(column, initial=0.0)) for column in values.values()))
        highest = 0.0
        stacked = np.zeros(time_s.size)
        for curve in reversed(panel.curves):
            stacked = stacked + values[curve.name] if curve.filled else values[curve.name]
            highest = max(highest, panel.show_curve(curve.name, time_s, stacked / scale.unit_bytes, phase))
        panel.fit(highest)
        panel.show_gaps(gaps(time_s, np.isfinite(window.columns["active_blocks"]), _GAP_PATIENCE_S))

    def texts_at(self, name: str, at_s: float) -> dict[str, str]:
        if self.hover_s is None:
            return {key: _bytes(value) for key, value in self._current(name).items()}
        assert self._window is not None, "charts_with_content found data"
        time_s = self._window.time_s + self._window.end_ns / 1e9
        index = nearest_index(time_s, at_s)
        return {key: _bytes(float(column[index])) for key, column in self._values[name].items()}

    def snap_to_point(self, x: float) -> float:
        window = self._window
        return x if window is None else nearest(window.time_s + window.end_ns / 1e9, x)

    def available_range(self, last_s: float) -> tuple[float, float]:
        span_ns = overview_span_ns(self.session.overview)
        if span_ns is None:
            return last_s - RANGES_S[self.default_range], last_s
        wall_ns = self.session.history.wall_ns(0)
        begin_s, end_s = ((at_ns - wall_ns) / 1e9 for at_ns in span_ns)
        last_s = max(end_s, last_s)
        return min(begin_s, last_s - MIN_RANGE_S), last_s

    def _current(self, name: str) -> dict[str, float]:
        """Return each curve's value at the cursor, in bytes. The values agree with the tables above the charts."""
        mirror, sample = self.session.mirror, self.session.history.newest_sample
        block_bytes = mirror.hello.cache.block_bytes if mirror.hello is not None else 0
        active, cached, _ = block_counts(mirror)
        values = {
            "cached_blocks": cached,
            "active_blocks": active,
            "host_blocks": _in_use(mirror, Tier.HOST),
            "disk_blocks": _in_use(mirror, Tier.DISK),
            "memory_used_bytes": sample.memory_used_bytes if sample is not None else None,
            "process_bytes": sample.process_bytes if sample is not None else None,
        }
        factors = {curve.name: block_bytes if chart.is_blocks else 1 for chart in _CHARTS for curve in chart.curves}
        curves = [curve.name for curve in self.panels[name].curves]
        return {key: _known_or_nan(values[key]) * factors[key] for key in curves}

    def _charted_values(self, window: HistoryWindow) -> dict[str, dict[str, FloatArray]]:
        hello = self.session.mirror.hello
        block_bytes = hello.cache.block_bytes if hello is not None else 0
        columns = {}
        for chart in _CHARTS:
            factor = block_bytes if chart.is_blocks else 1
            values = {curve.name: window.columns[curve.name] * factor for curve in chart.curves}
            if any(np.nanmax(column, initial=0.0) > 0 for column in values.values()):
                columns[chart.title] = values
        return columns

    def _make_panel(self, chart: _Chart) -> ChartPanel:
        panel = ChartPanel(chart.title, chart.curves, self.scales[chart.title].text)
        panel.legend.explain(chart.tip)
        panel.setFixedHeight(scaled(_CHART_HEIGHT))
        return panel


def _in_use(mirror: Mirror, tier: Tier) -> int:
    return mirror.count(BlockState.ACTIVE, tier) + mirror.count(BlockState.CACHED, tier)


def _known_or_nan(value: int | None) -> float:
    return float(value) if value is not None and value >= 0 else np.nan


def _bytes(value: float) -> str:
    return num_bytes(round(value)) if math.isfinite(value) else NOTHING

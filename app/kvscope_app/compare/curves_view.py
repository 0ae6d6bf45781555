"""Curves of both runs overlaid in panels: A solid, B dashed. All panels share the time range and the cursor.

A click moves the cursor. Dragging and Ctrl+wheel change the range, which is stored in `SessionPair.shared_zoom`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.compare.overlay import PANELS, Curve, OverlaidPanel, curve_of
from kvscope_app.compare.session_pair import SessionPair
from kvscope_app.playback.playback import time_text
from kvscope_app.session.stop_bands import stop_bands
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import Theme
from kvscope_app.views.chart.axes import TimeAxis
from kvscope_app.views.chart.chart_stack import PanelGrid
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec

_STEPS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
_LABEL_SPACING_PX: Final = 70
SIDES: Final = (CurveSpec("A", "A", 0), CurveSpec("B", "B", 1, dashed=True))
"""Names, colours and line styles of runs A and B throughout the window."""
_MIN_RANGE_S: Final = 1e-3


class CurvesView(QWidget):
    """Chart panels listed in `overlay.PANELS`, as many side by side as fit."""

    def __init__(self, pair: SessionPair) -> None:
        super().__init__()
        self._pair = pair
        self.setAccessibleName("Curves of both runs")
        self._charts = PanelGrid()
        self._charts.set_panels({spec.key: _panel(spec) for spec in PANELS})
        self._charts.show_panels([spec.key for spec in PANELS])
        self._curves: dict[str, tuple[Curve, Curve]] = {}
        self._hover_s: float | None = None
        self._lay_out()
        for panel in self.panels.values():
            panel.hovered.connect(self._on_hover)
            panel.range_dragged.connect(self.show_time)
            panel.chosen.connect(lambda x: pair.go_to(pair.origin_ns + round(x * 1e9)))
        pair.cursor_changed.connect(self.show_cursor)
        pair.shared_zoom.changed.connect(self.refresh)
        pair.aligned.connect(self._on_aligned)

    @property
    def panels(self) -> dict[str, ChartPanel]:
        return self._charts.panels

    def show_time(self, first_s: float, last_s: float) -> None:
        """Show a time range, in seconds from the start of the pair's timeline. A range of up to 1 ms is ignored."""
        first_s, last_s = max(first_s, 0.0), min(last_s, self._length_s)
        origin_ns = self._pair.origin_ns
        if last_s - first_s > _MIN_RANGE_S:
            span = TimeSpan(origin_ns + round(first_s * 1e9), origin_ns + round(last_s * 1e9))
            self._pair.shared_zoom.show(span)
        self.refresh()  # resets a dragged range that is too short or exceeds the end

    def show_all(self) -> None:
        self._pair.shared_zoom.show(None)

    def refresh(self) -> None:
        zero_ns, span = self._pair.origin_ns, self._pair.shared_zoom.span
        if span is None:
            span = TimeSpan(zero_ns, zero_ns + round(max(self._length_s, 1.0) * 1e9))
        shown_ns = (span.begin_ns, span.end_ns)
        first_s, last_s = ((at_ns - zero_ns) / 1e9 for at_ns in shown_ns)
        stops = [
            band
            for style, side in zip(SIDES, self._pair.sides, strict=True)
            for band in stop_bands(side.session, first_s, last_s, zero_ns + side.offset_ns, style.name)
        ]
        for spec in PANELS:
            panel, highest = self.panels[spec.key], 0.0
            panel.show_time(first_s, last_s, None)
            curves = []
            for style, side in zip(SIDES, self._pair.sides, strict=True):
                offset_ns = side.offset_ns
                own_ns = (shown_ns[0] + offset_ns, shown_ns[1] + offset_ns)
                curve = curve_of(spec, side.session.overview, zero_ns + offset_ns, own_ns)
                highest = max(highest, panel.show_curve(style.name, curve.seconds, curve.values, 0))
                curves.append(curve)
            panel.fit(highest)
            panel.show_stops(stops)
            self._curves[spec.key] = (curves[0], curves[1])
        self.show_cursor()

    def show_cursor(self) -> None:
        """Draw the pair's cursor, and show the curves' values at that time, or at the mouse while it is over a
        panel.
        """
        at_s = self._hover_s
        if at_s is None:
            at_s = (self._pair.cursor_ns - self._pair.origin_ns) / 1e9
        for spec in PANELS:
            panel = self.panels[spec.key]
            panel.show_cursor(at_s)
            if spec.key in self._curves:
                a, b = self._curves[spec.key]
                panel.legend.set_values({"A": spec.text(a.value_at(at_s)), "B": spec.text(b.value_at(at_s))})

    def apply_theme(self, theme: Theme) -> None:
        self._charts.apply_theme(theme)

    @property
    def _length_s(self) -> float:
        first_ns, last_ns = self._pair.range_ns
        return (last_ns - first_ns) / 1e9

    def _on_aligned(self) -> None:
        """Show the whole timeline, because the visible range now covers other times of B."""
        self.show_all()
        self.refresh()

    def _on_hover(self, x: float | None) -> None:
        self._hover_s = x
        self.show_cursor()

    def _lay_out(self) -> None:
        scroll = QScrollArea()
        self._charts.setContentsMargins(4, 4, 8, 6)
        self._charts.set_scroll_area(scroll)
        scroll.setWidget(self._charts)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(scroll)


def _panel(spec: OverlaidPanel) -> ChartPanel:
    return ChartPanel(spec.title, SIDES, spec.axis_text, top=spec.top, join_gap_s=2.5, time_axis=ElapsedAxis())


class ElapsedAxis(TimeAxis):
    """Bottom axis with the time since the start of the pair's timeline: `0:30`, `1:02:00`."""

    def clock_text(self, value: float) -> str:
        return time_text(max(value, 0.0), value)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        min_step_s = (maxVal - minVal) * _LABEL_SPACING_PX / max(size, 1)
        step = next((step for step in _STEPS_S if step >= min_step_s), _STEPS_S[-1])
        multiples = np.arange(np.ceil(minVal / step), np.floor(maxVal / step) + 1)
        return [(step, (step * multiples).tolist())]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        """Return tick labels, with tenths of a second only if the ticks are less than a second apart."""
        texts = [self.clock_text(value) for value in values]
        return texts if spacing < 1 else [text.partition(".")[0] for text in texts]

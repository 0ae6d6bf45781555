"""The curves of devices over time: a chart a quantity, a curve a GPU, and the host's own.

Owns the range of time that is shown. A chart is drawn a call; one of which nothing was ever told is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from PySide6.QtCore import QSettings, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.look.makers import label
from kvscope_app.look.number_text import NOTHING, num_bytes, percent
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.session.device_log import HOST, FloatArray
from kvscope_app.session.session import Session
from kvscope_app.session.shown_stops import stop_bands
from kvscope_app.setting_names import DEVICES_RANGE
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec
from kvscope_app.views.chart.time_bar import DEFAULT_RANGE, RANGES_S, TimeBar

_JOIN_S: Final = 3.0
_HEIGHT: Final = 128
_WIDTH: Final = 330
_AT_ONCE: Final = 5
_GIB: Final = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A chart: a column of the log, of which devices, and how its axis and its values are written."""

    title: str
    column: str
    of_host: bool
    axis_text: Callable[[float], str]
    value_text: Callable[[float], str]
    tip: str
    unit: float = 1.0
    """What the axis counts."""
    top: float | None = None


def _share(value: float) -> str:
    return percent(value, 0)


def _rate(value: float) -> str:
    return f"{num_bytes(value)}/s"


def _gib(value: float) -> str:
    return f"{value:g} GiB"


QUANTITIES: Final = (
    Quantity(
        "GPU utilization", "utilization", False, _share, _share, "Share of time that a kernel was running", top=1.0
    ),
    Quantity("GPU memory", "memory_used_bytes", False, _gib, num_bytes, "Used by processes and the driver", _GIB),
    Quantity("Power", "power_watts", False, lambda v: f"{v:g} W", lambda v: f"{v:.0f} W", "Power of the whole card"),
    Quantity(
        "Temperature",
        "temperature_celsius",
        False,
        lambda v: f"{v:g} °",
        lambda v: f"{v:.0f} °C",
        "Temperature of the chip",
    ),
    Quantity(
        "GPU clock",
        "sm_clock_mhz",
        False,
        lambda v: f"{v:g} GHz",
        lambda v: f"{v:.0f} MHz",
        "Falls when the GPU is idle, too hot or power-limited",
        1000.0,
    ),
    Quantity("PCIe", "pcie_bytes_s", False, lambda v: f"{v:g} G", _rate, "GiB/s, both directions together", _GIB),
    Quantity("NVLink", "nvlink_bytes_s", False, lambda v: f"{v:g} G", _rate, "GiB/s, both directions, all links", _GIB),
    Quantity("CPU utilization", "utilization", True, _share, _share, "Of all the machine's cores", top=1.0),
    Quantity(
        "Host memory",
        "memory_used_bytes",
        True,
        _gib,
        num_bytes,
        "Memory not available to processes without swapping",
        _GIB,
    ),
)


class DeviceCharts(QWidget):
    """A bar with ranges, and the charts under it, as many side by side as there is room for."""

    chosen = Signal(float)
    """A second of the monotonic clock that was clicked."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._theme: Theme = DARK
        self._area: QScrollArea | None = None
        self.bar = TimeBar(is_file=session.is_file, inset=False)
        self.range_s = RANGES_S[DEFAULT_RANGE]
        self._fixed: tuple[float, float] | None = None
        self._devices: tuple[tuple[str, str], ...] = ()
        self.panels: dict[str, ChartPanel] = {}
        self._hover_s: float | None = None
        self._turn = 0
        self._num_columns = 0
        self._box = QWidget()
        self._grid = QGridLayout(self._box)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._lay_out()
        self.bar.range_chosen.connect(self.show_last)
        self.bar.live_requested.connect(lambda: self.show_last(self.range_s))

    def show_devices(self, devices: Sequence[tuple[str, str]]) -> None:
        """Key and name of each GPU there is; charts are made anew when these change."""
        if tuple(devices) != self._devices or not self.panels:
            self._devices = tuple(devices)
            self._make_panels()

    def refresh(self) -> None:
        """Draw the next few charts: a call stays short however many there are, and all show about the same time."""
        shown = self._shown()
        self._turn = (self._turn + _AT_ONCE) % len(shown) if shown else 0
        self._draw((shown + shown)[self._turn : self._turn + min(_AT_ONCE, len(shown))])

    def refresh_all(self) -> None:
        """Draw every chart now."""
        self._draw(self._shown())

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
        kept = str(settings.value(DEVICES_RANGE, ""))
        if kept in RANGES_S:
            self.range_s = RANGES_S[kept]
            self.bar.show_range(self.range_s)

    def remember(self, settings: QSettings) -> None:
        """The range, for the next time."""
        settings.setValue(DEVICES_RANGE, next(name for name, length in RANGES_S.items() if length == self.range_s))

    def lie_in(self, area: QScrollArea) -> None:
        """The wheel over the charts is for `area`."""
        self._area = area
        for panel in self.panels.values():
            panel.plot.area = area

    def apply_theme(self, theme: Theme) -> None:
        """Take its colours."""
        self._theme = theme
        for panel in self.panels.values():
            panel.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place()

    def _shown(self) -> list[Quantity]:
        """Those of which something was told. None before `show_devices`: Qt may resize this first, and an error in
        `resizeEvent` never comes out where Python called Qt: PySide loses it, and drops references that it never had.
        """
        return [quantity for quantity in QUANTITIES if quantity.title in self.panels and self._is_told(quantity)]

    def _is_told(self, quantity: Quantity) -> bool:
        keys = [HOST] if quantity.of_host else [key for key, _ in self._devices]
        curves = [self._session.history.devices.curve(key, quantity.column)[1] for key in keys]
        return any(bool(np.isfinite(values).any()) for values in curves)

    def _draw(self, quantities: Iterable[Quantity]) -> None:
        self._place()
        first_s, last_s = self._span()
        place_s = self._session.shown_until_ns / 1e9
        is_behind = first_s <= place_s < last_s - 1.5
        stopped = stop_bands(self._session, first_s, last_s)
        for quantity in quantities:
            panel = self.panels[quantity.title]
            panel.show_time(first_s, last_s, last_s if self._fixed is None and not is_behind else None)
            panel.show_place(place_s if is_behind else None)
            panel.show_stops(stopped)
            self._draw_curves(quantity, panel, first_s, last_s)
            panel.settle()
        self._show_values(place_s if is_behind else last_s)

    def _draw_curves(self, quantity: Quantity, panel: ChartPanel, first_s: float, last_s: float) -> None:
        highest = 0.0
        for curve in panel.curves:
            time_s, values = self._session.history.devices.curve(curve.name, quantity.column)
            begin = max(int(np.searchsorted(time_s, first_s)) - 1, 0)
            end = int(np.searchsorted(time_s, last_s, "right")) + 1
            shown = panel.show_curve(curve.name, time_s[begin:end], values[begin:end] / quantity.unit, begin)
            highest = max(highest, shown)
        panel.fit(highest)

    def _span(self) -> tuple[float, float]:
        if self._fixed is not None:
            return self._fixed
        last_s = float(math.ceil(self._session.shown_until_ns / 1e9))
        begin_s = self._session.history.devices.begin_s
        if math.isinf(self.range_s):
            shortest = min(RANGES_S.values())
            return min(begin_s if begin_s is not None else last_s, last_s - shortest), last_s
        return last_s - self.range_s, last_s

    def _show_values(self, at_s: float) -> None:
        at_s = at_s if self._hover_s is None else self._hover_s
        for quantity in QUANTITIES:
            panel = self.panels.get(quantity.title)
            if panel is None:
                continue
            names = [curve.name for curve in panel.curves]
            values = {
                name: _value_at(*self._session.history.devices.curve(name, quantity.column), at_s) for name in names
            }
            texts = {n: NOTHING if v is None else quantity.value_text(v) for n, v in values.items()}
            panel.legend.set_values(texts)

    def _on_hover(self, x: float | None) -> None:
        self._hover_s = x
        for panel in self.panels.values():
            panel.show_cursor(x)
        clock = next(iter(self.panels.values())).clock_text
        self.bar.time.setText("" if x is None else clock(x))
        self._show_values(self._session.shown_until_ns / 1e9)

    def _make_panels(self) -> None:
        for panel in self.panels.values():
            self._grid.removeWidget(panel)
            panel.hide()
            panel.deleteLater()
        self.panels = {quantity.title: self._make_panel(quantity) for quantity in QUANTITIES}
        self._num_columns = 0
        self.apply_theme(self._theme)
        if self._area is not None:
            self.lie_in(self._area)

    def _make_panel(self, quantity: Quantity) -> ChartPanel:
        names = [(HOST, "")] if quantity.of_host else self._devices
        colors = range(len(self._theme.series) - 1)
        curves = [
            CurveSpec(key, name if len(names) > 1 else "", colors[place % len(colors)])
            for place, (key, name) in enumerate(names)
        ]
        panel = ChartPanel(quantity.title, curves, quantity.axis_text, top=quantity.top, join_gap_s=_JOIN_S)
        panel.setParent(self._box)
        panel.hide()
        panel.legend.explain(quantity.tip)
        panel.setFixedHeight(_HEIGHT)
        panel.show_time_labels(True)
        panel.hovered.connect(self._on_hover)
        panel.range_dragged.connect(self.look_back)
        panel.chosen.connect(self.chosen)
        panel.fit_wanted.connect(lambda: self.show_last(self.range_s))
        return panel

    def _place(self) -> None:
        """Those that are told of, one after another."""
        columns = max(1, min(3, self.width() // _WIDTH))
        shown = [quantity.title for quantity in self._shown()]
        visible = [title for title, panel in self.panels.items() if not panel.isHidden()]
        if columns == self._num_columns and shown == visible:
            return
        self._num_columns = columns
        for title, panel in self.panels.items():
            self._grid.removeWidget(panel)
            panel.setVisible(title in shown)
        for place, title in enumerate(shown):
            self._grid.addWidget(self.panels[title], place // columns, place % columns)

    def _lay_out(self) -> None:
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(8)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(label("Over time", "heading"))
        column.addWidget(self.bar)
        column.addWidget(self._box)


def _value_at(time_s: FloatArray, values: FloatArray, at_s: float) -> float | None:
    """The newest until then; None where it is not known."""
    place = int(np.searchsorted(time_s, at_s, "right")) - 1
    if not time_s.size:
        return None
    value = float(values[max(place, 0)])
    return value if math.isfinite(value) else None

"""Charts of devices over time: one per quantity, with a curve per GPU. Some quantities are those of the host instead.

A quantity without any data has no chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from kvscope_app.session.device_log import HOST, FloatArray
from kvscope_app.session.session import Session
from kvscope_app.setting_names import DEVICES_RANGE
from kvscope_app.ui.number_text import NOTHING, num_bytes, percent
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.chart_stack import MIN_RANGE_S, ChartStack
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec

_JOIN_GAP_S: Final = 3.0
_CHART_HEIGHT: Final = 128
_GIB: Final = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Definition of a chart: a column of the device log, for GPUs or for the host (`of_host`), and the format of its
    values.
    """

    title: str
    column: str
    of_host: bool
    axis_text: Callable[[float], str]
    value_text: Callable[[float], str]
    tip: str
    unit: float = 1.0
    """Divisor of the values before they are drawn. `axis_text` formats the quotient, `value_text` the original value.
    """
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
        "Memory that cannot be freed without swapping",
        _GIB,
    ),
)
_BY_TITLE: Final = {quantity.title: quantity for quantity in QUANTITIES}


class DeviceCharts(ChartStack):
    range_setting: ClassVar[str] = DEVICES_RANGE
    charts_per_refresh: ClassVar[int] = 5

    def __init__(self, session: Session) -> None:
        super().__init__(session, "Over time")
        self._devices: tuple[tuple[str, str], ...] = ()

    def show_devices(self, devices: Sequence[tuple[str, str]]) -> None:
        """Set the (key, name) pairs of the GPUs. All charts are recreated if the pairs changed."""
        if tuple(devices) != self._devices or not self.panels:
            self._devices = tuple(devices)
            self.set_panels({quantity.title: self._make_panel(quantity) for quantity in QUANTITIES})

    def charts_with_content(self, first_s: float, last_s: float) -> Sequence[str]:
        return [title for title in self.panels if self._is_available(_BY_TITLE[title])]

    def draw_curves(self, name: str, first_s: float, last_s: float) -> None:
        panel, quantity, highest = self.panels[name], _BY_TITLE[name], 0.0
        for curve in panel.curves:
            time_s, values = self._curve(curve.name, quantity)
            start = max(int(np.searchsorted(time_s, first_s)) - 1, 0)
            end = int(np.searchsorted(time_s, last_s, "right")) + 1
            curve_max = panel.show_curve(curve.name, time_s[start:end], values[start:end] / quantity.unit, start)
            highest = max(highest, curve_max)
        panel.fit(highest)

    def texts_at(self, name: str, at_s: float) -> dict[str, str]:
        quantity, curves = _BY_TITLE[name], self.panels[name].curves
        values = {curve.name: _value_at(*self._curve(curve.name, quantity), at_s) for curve in curves}
        return {key: NOTHING if value is None else quantity.value_text(value) for key, value in values.items()}

    def available_range(self, last_s: float) -> tuple[float, float]:
        begin_s = self.session.history.devices.begin_s
        return min(last_s if begin_s is None else begin_s, last_s - MIN_RANGE_S), last_s

    def _is_available(self, quantity: Quantity) -> bool:
        keys = [HOST] if quantity.of_host else [key for key, _ in self._devices]
        return any(bool(np.isfinite(self._curve(key, quantity)[1]).any()) for key in keys)

    def _curve(self, key: str, quantity: Quantity) -> tuple[FloatArray, FloatArray]:
        return self.session.history.devices.curve(key, quantity.column)

    def _make_panel(self, quantity: Quantity) -> ChartPanel:
        names = [(HOST, "")] if quantity.of_host else self._devices
        colors = range(len(self.theme.series) - 1)
        curves = [
            CurveSpec(key, name if len(names) > 1 else "", colors[index % len(colors)])
            for index, (key, name) in enumerate(names)
        ]
        panel = ChartPanel(quantity.title, curves, quantity.axis_text, top=quantity.top, join_gap_s=_JOIN_GAP_S)
        panel.legend.explain(quantity.tip)
        panel.setFixedHeight(scaled(_CHART_HEIGHT))
        return panel


def _value_at(time_s: FloatArray, values: FloatArray, at_s: float) -> float | None:
    """Return the newest value up to `at_s`, or the first value if all are later. None if that value is unknown."""
    index = int(np.searchsorted(time_s, at_s, "right")) - 1
    if not time_s.size:
        return None
    value = float(values[max(index, 0)])
    return value if math.isfinite(value) else None

"""Texts that describe a step in relation to the device's limits. Imports no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_app.ui.number_text import count, percent, plural, seconds
from kvscope_app.views.roofline.log_scale import with_prefix
from kvscope_app.views.roofline.points import PointKind, RooflinePoints
from kvscope_telemetry.messages.telemetry import DeviceInfo

KIND_TEXTS: Final = {PointKind.DECODE: "decode", PointKind.MIXED: "mixed", PointKind.PREFILL: "prefill"}
KIND_COLORS: Final = {PointKind.DECODE: "good", PointKind.MIXED: "warn", PointKind.PREFILL: "block_active"}
"""Theme colour of each kind of step. Prefill and decode have the same colours as on the timeline."""
_OVERHEAD_BELOW: Final = 0.2
"""Fraction of a device limit. A step that uses less than this of both memory bandwidth and compute counts as limited by
overhead: kernel launches, copies and Python.
"""


def bytes_text(rate: float, limit: float) -> str:
    """Return text such as `3.1 GB/s, 61 % of memory bandwidth`. `rate` and `limit` are in bytes per second; a `limit`
    of 0 is unknown.
    """
    return with_prefix(rate, "B/s") + (f", {percent(rate / limit, 0)} of memory bandwidth" if limit else "")


def flops_text(rate: float, limit: float) -> str:
    """Return text such as `5.2 GFLOP/s, 4 % of peak FLOP/s`. `rate` and `limit` are in FLOP per second; a `limit` of 0
    is unknown.
    """
    return with_prefix(rate, "FLOP/s") + (f", {percent(rate / limit, 0)} of peak FLOP/s" if limit else "")


def point_text(points: RooflinePoints, at: int, device: DeviceInfo) -> str:
    steps, index = points.steps, int(points.step_index[at])
    size = int(steps.starts[index + 1] - steps.starts[index])
    return " · ".join(
        (
            f"Step {count(int(steps.step[index]))}: {KIND_TEXTS[PointKind(int(points.kind[at]))]}",
            plural(size, "request"),
            seconds(float(steps.forward_ns[index]) / 1e9),
            bytes_text(float(points.bytes_per_s[at]), device.read_bytes_per_s),
            flops_text(float(points.flops_per_s[at]), device.flops_per_s),
        )
    )


def bound_text(bytes_per_s: float, flops_per_s: float, device: DeviceInfo) -> str:
    """Return which limit of the device the step came closer to, or overhead if it used little of both memory bandwidth
    and compute.

    Returns "" if the limits of the device are unknown.
    """
    if not device.read_bytes_per_s or not device.flops_per_s:
        return ""
    memory, compute = bytes_per_s / device.read_bytes_per_s, flops_per_s / device.flops_per_s
    if max(memory, compute) < _OVERHEAD_BELOW:
        return "overhead (neither memory nor compute)"
    return "memory" if memory > compute else "compute"

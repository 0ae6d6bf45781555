"""A step against the limits of its device, in words. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_app.look.number_text import count, percent, plural, seconds
from kvscope_app.views.roofline.log_scale import with_prefix
from kvscope_app.views.roofline.points import Kind, Points
from kvscope_telemetry.messages.telemetry import DeviceInfo

KIND_WORDS: Final = {Kind.DECODE: "decode", Kind.MIXED: "mixed", Kind.PREFILL: "prefill"}
KIND_COLORS: Final = {Kind.DECODE: "good", Kind.MIXED: "warn", Kind.PREFILL: "block_active"}
"""Prefill and decode as on the timeline."""


def bytes_text(rate: float, limit: float) -> str:
    """`3.1 GB/s, 61 % of what it can read`."""
    return with_prefix(rate, "B/s") + (f", {percent(rate / limit, 0)} of its memory" if limit else "")


def flops_text(rate: float, limit: float) -> str:
    """`5.2 GFLOP/s, 4 % of what it can compute`."""
    return with_prefix(rate, "FLOP/s") + (f", {percent(rate / limit, 0)} of its arithmetic" if limit else "")


def point_text(points: Points, at: int, device: DeviceInfo) -> str:
    """All about one of them, on a line."""
    steps, place = points.steps, int(points.place[at])
    size = int(steps.starts[place + 1] - steps.starts[place])
    return " · ".join(
        (
            f"Step {count(int(steps.step[place]))}: {KIND_WORDS[Kind(int(points.kind[at]))]}",
            plural(size, "request"),
            seconds(float(steps.forward_ns[place]) / 1e9),
            bytes_text(float(points.bytes_per_s[at]), device.read_bytes_per_s),
            flops_text(float(points.flops_per_s[at]), device.flops_per_s),
        )
    )


def bound_text(intensity: float, device: DeviceInfo) -> str:
    """Which of the two limits a step of this intensity meets first; empty where they are unknown."""
    if not device.read_bytes_per_s or not device.flops_per_s:
        return ""
    ridge = device.flops_per_s / device.read_bytes_per_s
    return "memory" if intensity < ridge else "arithmetic"

"""Colours of a report in light and dark style. They equal the desktop's colours, under separate names.

The colours of curves are named after the figures that they show, so that a report looks like the window that it was
made from.
"""

from __future__ import annotations

from typing import Final

LIGHT: Final = {
    # page and axes
    "page": "#eef0f4",
    "paper": "#ffffff",
    "edge": "#d7dce4",
    "text": "#1a1e26",
    "soft": "#5b6474",
    "grid": "#e6e9ee",
    # blocks
    "free": "#e3e7ed",
    "active": "#2f80ea",
    "cached": "#ebb76a",
    # curves: tokens, requests, latencies (time to first token, queue time, time per token), evicted blocks
    "prefill": "#0771c2",
    "decode": "#0a8a6a",
    "running": "#0a8a6a",
    "waiting": "#ab411c",
    "first": "#b5488a",
    "queue": "#5741dd",
    "next": "#c87f00",
    "evicted": "#d13c27",
    # phases of requests
    "queued": "#8b5301",
    "decoding": "#12805c",
    "preempted": "#d1353f",
    "swapped": "#5f29d3",
    # marks, and time in which the engine was stopped
    "bookmark": "#1a66dd",
    "alarm": "#8b5301",
    "stopped": "#8b5301",
    "stopped-time": "#a9b1be",
}
DARK: Final = {
    # page and axes
    "page": "#0d0f13",
    "paper": "#15181e",
    "edge": "#2a303b",
    "text": "#e6e9ef",
    "soft": "#949dae",
    "grid": "#232831",
    # blocks
    "free": "#232933",
    "active": "#3f8ff0",
    "cached": "#8f6a2e",
    # curves: tokens, requests, latencies (time to first token, queue time, time per token), evicted blocks
    "prefill": "#5badfe",
    "decode": "#34c8a0",
    "running": "#34c8a0",
    "waiting": "#f2764a",
    "first": "#dd84c8",
    "queue": "#9281ec",
    "next": "#f0a63a",
    "evicted": "#ff5566",
    # phases of requests
    "queued": "#f0b040",
    "decoding": "#3ecb92",
    "preempted": "#ff6b6b",
    "swapped": "#c05eb8",
    # marks, and time in which the engine was stopped
    "bookmark": "#5b9dff",
    "alarm": "#f0b040",
    "stopped": "#f0b040",
    "stopped-time": "#566072",
}
_WITHOUT_CLASS: Final = ("page", "paper", "edge", "text", "soft", "grid")
"""Colours of everything around the curves and bars of a chart: they are used as CSS variables only."""


def variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


def ink_classes() -> str:
    """Return the CSS rules that define one class per colour of chart elements."""
    return "".join(f".{name}{{--ink:var(--{name})}}" for name in LIGHT if name not in _WITHOUT_CLASS)


def rgb(color: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue

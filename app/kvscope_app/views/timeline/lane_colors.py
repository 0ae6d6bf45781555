"""Colours of the lanes: request states as in the request table, blocks as in the page map."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QColor

from kvscope_app.ui.theme import Theme, mix
from kvscope_telemetry.request_phase import RequestPhase

PHASE_COLORS: Final = {
    RequestPhase.RUNNING: "good",
    RequestPhase.DECODE: "good",
    RequestPhase.PREFILL: "block_active",
    RequestPhase.QUEUED: "warn",
    RequestPhase.PREEMPTED: "bad",
    RequestPhase.SWAPPED: "flash_saved",
    RequestPhase.ABORTED: "muted",
    RequestPhase.REFUSED: "bad",
}
PHASE_TEXTS: Final = {
    RequestPhase.RUNNING: "runs",
    RequestPhase.DECODE: "decodes",
    RequestPhase.PREFILL: "prefills",
    RequestPhase.QUEUED: "waiting",
    RequestPhase.PREEMPTED: "preempted, to be recomputed",
    RequestPhase.SWAPPED: "preempted, swapped to a lower tier",
    RequestPhase.ABORTED: "aborted",
    RequestPhase.REFUSED: "refused",
}
PHASE_LEGEND: Final = {
    RequestPhase.QUEUED: "waiting",
    RequestPhase.PREFILL: "prefill",
    RequestPhase.DECODE: "decode",
    RequestPhase.PREEMPTED: "preempted",
    RequestPhase.SWAPPED: "swapped out",
    RequestPhase.ABORTED: "aborted",
}
"""Legend entries, in the order of a request's life. Refused requests have no entry: they are a short mark in the colour
of preempted ones."""
QUEUED_SOFT: Final = 0.35
"""Paleness of waiting requests, which hold no blocks and are drawn as a thin line."""
STOPPED_COLOR: Final = "muted"
"""Colour of all requests while the engine is paused or suspended, whatever their phase."""
STOPPED_SOFT: Final = 0.45
STOPPED_LABEL: Final = "engine paused or suspended"
STOPPED_GROUND: Final = 0.83
"""Paleness of the background behind the lanes while the engine is paused or suspended."""


def ink(name: str, theme: Theme) -> int:
    return _pixel(str(getattr(theme, name)))


def softened(name: str, theme: Theme, share: float) -> int:
    """Return a colour of the theme as a pixel, mixed with `share` of the background."""
    return _pixel(mix(str(getattr(theme, name)), theme.base, share))


def _pixel(color: str) -> int:
    return QColor(color).rgba()

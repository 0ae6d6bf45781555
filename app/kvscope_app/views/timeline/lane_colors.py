"""Colours of the timeline's lanes. Request states have the same colours as in the request table, and blocks the
same as in the page map.
"""

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
"""Legend entries, in the order of a request's life. Refused requests are drawn as short ticks in the colour of
preempted requests, and have no entry of their own.
"""
QUEUED_PALENESS: Final = 0.35
"""Share of background in the colour of waiting requests, which hold no blocks and are drawn as a thin line."""
STOPPED_COLOR: Final = "muted"
STOPPED_PALENESS: Final = 0.45
STOPPED_LABEL: Final = "engine paused or suspended"
STOPPED_BACKGROUND_PALENESS: Final = 0.83
"""Share of the normal background colour (0 to 1) in the warning colour that is drawn behind the lanes while the
engine is paused or suspended.
"""


def theme_pixel(name: str, theme: Theme) -> int:
    return _pixel(str(getattr(theme, name)))


def pale_pixel(name: str, theme: Theme, share: float) -> int:
    """Return a theme colour mixed with `share` (0 to 1) of the background, as a pixel 0xAARRGGBB."""
    return _pixel(mix(str(getattr(theme, name)), theme.base, share))


def _pixel(color: str) -> int:
    return QColor(color).rgba()

"""The colour of what each lane shows: states as in the table of requests, blocks as in the page map."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QColor

from kvscope_app.look.theme import Theme, mix
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
PHASE_WORDS: Final = {
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
"""In the order of a life; one that was refused is as red as one that was preempted, and a moment."""
QUEUED_SOFT: Final = 0.35
"""Who waits holds nothing: a thin line, paler."""
STOPPED_COLOR: Final = "muted"
"""Of a request while the engine stands still, whatever it did before: nothing is done for it."""
STOPPED_SOFT: Final = 0.45
STOPPED_WORD: Final = "engine paused or suspended"
STOPPED_GROUND: Final = 0.83
"""How pale what is behind the lanes is then."""


def ink(name: str, theme: Theme) -> int:
    """A colour of the theme as a pixel."""
    return _pixel(str(getattr(theme, name)))


def softened(name: str, theme: Theme, share: float) -> int:
    """The same with `share` of what is behind it."""
    return _pixel(mix(str(getattr(theme, name)), theme.base, share))


def _pixel(color: str) -> int:
    return QColor(color).rgba()

"""The colour of what each lane shows: states as in the table of requests, blocks as in the page map."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QColor

from kvscope_app.look.theme import Theme, mix
from kvscope_app.views.timeline.request_lanes import LanePhase

PHASE_COLORS: Final = {
    LanePhase.RUNNING: "good",
    LanePhase.DECODE: "good",
    LanePhase.PREFILL: "block_active",
    LanePhase.QUEUED: "warn",
    LanePhase.PREEMPTED: "bad",
    LanePhase.SWAPPED: "flash_saved",
    LanePhase.ABORTED: "muted",
    LanePhase.REFUSED: "bad",
}
PHASE_WORDS: Final = {
    LanePhase.RUNNING: "runs",
    LanePhase.DECODE: "decodes",
    LanePhase.PREFILL: "prefills",
    LanePhase.QUEUED: "waiting",
    LanePhase.PREEMPTED: "preempted, to be recomputed",
    LanePhase.SWAPPED: "preempted, swapped to a lower tier",
    LanePhase.ABORTED: "aborted",
    LanePhase.REFUSED: "refused",
}
PHASE_LEGEND: Final = {
    LanePhase.QUEUED: "waiting",
    LanePhase.PREFILL: "prefill",
    LanePhase.DECODE: "decode",
    LanePhase.PREEMPTED: "preempted",
    LanePhase.SWAPPED: "swapped out",
    LanePhase.ABORTED: "aborted",
}
"""In the order of a life; one that was refused is as red as one that was preempted, and a moment."""
QUEUED_SOFT: Final = 0.35
"""Who waits holds nothing: a thin line, paler."""
STOPPED_COLOR: Final = "muted"
"""Of a request while the engine stands still, whatever it did before: nothing is done for it."""
STOPPED_SOFT: Final = 0.45
STOPPED_WORD: Final = "engine paused"
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

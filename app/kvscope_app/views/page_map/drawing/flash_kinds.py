"""What a cell can flash for, and the levels of its fading. Knows no colours of themes but their names.

A *level* is one byte: 0 is dark, then for each kind its fading levels, weak before strong. `LEVELS` is the one place
that knows how long and how strong each is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class FlashKind(IntEnum):
    """Why a cell lights up. `CHANGED` gives way to the others, which say what happened."""

    CHANGED = 0
    EVICTED = 1
    COPIED = 2
    SAVED = 3
    LOADED = 4


MOVES: Final = (FlashKind.EVICTED, FlashKind.COPIED, FlashKind.SAVED, FlashKind.LOADED)
"""The kinds that a frame's `Moves` tells of."""


@dataclass(frozen=True, slots=True)
class FlashLevel:
    """One level: how far a cell goes towards `color` of the theme, and its age when it goes down."""

    kind: FlashKind
    color: str
    share_dark: float
    share_light: float
    fade_ns: int


_COLORS: Final = {kind: f"flash_{kind.name.lower()}" for kind in MOVES}

LEVELS: Final = (
    FlashLevel(FlashKind.CHANGED, "text", 0.0, 0.0, 0),
    FlashLevel(FlashKind.CHANGED, "text", 0.22, 0.12, 320_000_000),
    FlashLevel(FlashKind.CHANGED, "text", 0.45, 0.26, 140_000_000),
    *(
        FlashLevel(kind, _COLORS[kind], share, share, fade_ns)
        for kind in MOVES
        for share, fade_ns in ((0.45, 560_000_000), (0.9, 280_000_000))
    ),
)
STRENGTHS: Final = 2
"""Levels of each kind."""
FIRST_MOVE_LEVEL: Final = 1 + STRENGTHS


def top_level(kind: FlashKind) -> int:
    """The level at which a flash of `kind` begins."""
    return STRENGTHS * (kind + 1)


def level_below(level: int) -> int:
    """The level that a flash of `level` goes down to."""
    return level - 1 if level % STRENGTHS == 0 else 0

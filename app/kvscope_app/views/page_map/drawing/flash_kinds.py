"""Kinds of flashes and their fading levels. Refers to colours only by their names in the theme.

A *level* is one byte: 0 means no flash; then follow the levels of each kind, weak before strong. `LEVELS` defines the
duration and strength of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class FlashKind(IntEnum):
    """Reason for a cell's flash. `CHANGED` never replaces a flash of another kind."""

    CHANGED = 0
    EVICTED = 1
    COPIED = 2
    SAVED = 3
    LOADED = 4


MOVES: Final = (FlashKind.EVICTED, FlashKind.COPIED, FlashKind.SAVED, FlashKind.LOADED)


@dataclass(frozen=True, slots=True)
class FlashLevel:
    """One fading level of a flash.

    `share_dark` and `share_light` say how far the cell's colour moves towards the theme's `color` in a dark and in a
    light theme, 0 to 1. `fade_ns` is the age at which the flash drops to the next lower level.
    """

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
LEVELS_PER_KIND: Final = 2
FIRST_MOVE_LEVEL: Final = 1 + LEVELS_PER_KIND


def top_level(kind: FlashKind) -> int:
    return LEVELS_PER_KIND * (kind + 1)


def level_below(level: int) -> int:
    """Return the level to which a flash fades from `level`, or 0 if the flash ends."""
    return level - 1 if level % LEVELS_PER_KIND == 0 else 0

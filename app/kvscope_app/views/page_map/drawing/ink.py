"""Colours of the page map as look-up tables from rank to pixel.

A *rank* is `emphasis * 256 + key`: what stands out (blocks of the selected request) wins where blocks share a
pixel, then the key's own order. A pixel is `0xffRRGGBB`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.look.theme import Theme, mix, owner_colors, readable_on
from kvscope_app.views.page_map import color_modes as modes
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES, FlashKind, FlashLevel

Pixels = npt.NDArray[np.uint32]

NUM_KEYS: Final = 256
COVERAGES: Final = (1.0, 0.66, 0.33)
"""Shares of a pixel that a rounded cell covers, for smooth corners."""
_DIM: Final = 0.68
_HOLLOW: Final = 0.66


class Emphasis(IntEnum):
    """How a block stands out; the value is the high byte of its rank."""

    DIMMED = 0
    NORMAL = 1
    SELECTED = 2


class Ink:
    """The tables of one colour mode in one theme."""

    def __init__(self, mode: ColorMode, theme: Theme) -> None:
        self.background: int = pixel(theme.base)
        self.outline: int = pixel(theme.selection)
        self.mark: int = pixel(theme.selection)
        self.empty_outline: int = pixel(theme.block_free)
        """Around a block without memory."""
        self.glyphs = {kind: pixel(sign_color(kind, theme)) for kind in MOVES}
        """The sign in a cell that flashes for a move."""
        colors = key_colors(mode, theme)
        self.solid: Pixels = _table(colors, theme)
        """Shape (coverage, flash level, rank)."""
        self.hollow: Pixels = _table([hollow(color, theme) for color in colors], theme)
        """The same for the part of a cell whose slots hold no token."""


def pixel(color: str) -> int:
    """`#rrggbb` as an opaque RGB32 pixel."""
    return 0xFF000000 | int(color[1:], 16)


def sign_color(kind: FlashKind, theme: Theme) -> str:
    """Of the sign on a flash."""
    return readable_on(str(getattr(theme, f"flash_{kind.name.lower()}")), theme)


def hollow(color: str, theme: Theme) -> str:
    """Of the part of a cell whose slots hold no token, where the other is `color`."""
    return mix(color, theme.block_free, _HOLLOW)


def key_colors(mode: ColorMode, theme: Theme) -> list[str]:
    """The colour of each of the 256 keys; those not in use are the background's."""
    colors = [theme.base] * NUM_KEYS
    colors[modes.UNMAPPED] = theme.block_unmapped
    colors[modes.FREE] = theme.block_free
    _FILLERS[mode](colors, theme)
    return colors


def gradient(stops: tuple[str, ...], share: float) -> str:
    """The colour at `share` (0 to 1) of evenly spaced stops."""
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    return mix(stops[index], stops[index + 1], place - index)


def fill_stops(theme: Theme) -> tuple[str, ...]:
    """From a full block to one that is held and empty."""
    return (mix(theme.block_active, theme.base, 0.45), theme.block_active, theme.block_cached, theme.bad)


def sharing_stops(theme: Theme) -> tuple[str, ...]:
    """From one holder to many."""
    far = "#fff4c2" if theme.is_dark else "#4a0d3c"
    return (theme.block_active, theme.block_shared, far)


def age_stops(theme: Theme) -> tuple[str, ...]:
    """From long unused to used in this step."""
    if theme.is_dark:
        return ("#2b2f5e", "#6a3d9a", "#d2527f", "#ffb454", "#fff3b0")
    return ("#cfd6ea", "#a9a3d8", "#a9559f", "#a32a55", "#5c0f1f")


def attention_stops(theme: Theme) -> tuple[str, ...]:
    """From hardly read to where all attention is."""
    if theme.is_dark:
        return ("#1c3f63", "#2f7fa3", "#c9b458", "#f2803a", "#fff1cf")
    return ("#cfe3f2", "#86b6d6", "#e0b04a", "#d2541b", "#5c0f0f")


def unmeasured(theme: Theme) -> str:
    """A block whose attention is not known."""
    return mix(theme.muted, theme.block_free, 0.7)


def passed_over(theme: Theme) -> str:
    """A block that nobody chose to read."""
    return mix(attention_stops(theme)[0], theme.block_free, 0.6)


def lower_cached(color: str, theme: Theme) -> str:
    """A cached block of a lower tier whose needed blocks have `color`."""
    return mix(color, theme.block_free, 0.6)


def _state(colors: list[str], theme: Theme) -> None:
    colors[modes.DISK] = theme.block_disk
    colors[modes.HOST] = theme.block_host
    colors[modes.DISK_CACHED] = lower_cached(theme.block_disk, theme)
    colors[modes.HOST_CACHED] = lower_cached(theme.block_host, theme)
    colors[modes.CACHED] = theme.block_cached
    colors[modes.ACTIVE] = theme.block_active
    colors[modes.SHARED] = theme.block_shared
    colors[modes.UNKNOWN] = theme.muted


def _owner(colors: list[str], theme: Theme) -> None:
    for index, color in enumerate(owner_colors(theme)):
        colors[modes.OWNER_ACTIVE + index] = color
        colors[modes.OWNER_CACHED + index] = mix(color, theme.block_free, 0.62)


def _fill(colors: list[str], theme: Theme) -> None:
    for index in range(modes.FILL_STEPS + 1):
        colors[modes.FILL_FULL + index] = gradient(fill_stops(theme), index / modes.FILL_STEPS)


def _sharing(colors: list[str], theme: Theme) -> None:
    colors[modes.UNHELD] = mix(theme.block_cached, theme.block_free, 0.62)
    steps = modes.MAX_HOLDERS - 1
    for index in range(steps + 1):
        colors[modes.ONE_HOLDER + index] = gradient(sharing_stops(theme), (index / steps) ** 0.6)


def _age(colors: list[str], theme: Theme) -> None:
    for index in range(modes.AGE_STEPS + 1):
        colors[modes.OLDEST + index] = gradient(age_stops(theme), index / modes.AGE_STEPS)


def _attention(colors: list[str], theme: Theme) -> None:
    colors[modes.UNMEASURED] = unmeasured(theme)
    colors[modes.PASSED_OVER] = passed_over(theme)
    for index in range(modes.ATTENTION_STEPS + 1):
        colors[modes.COLDEST + index] = gradient(attention_stops(theme), index / modes.ATTENTION_STEPS)


_FILLERS: Final = {
    ColorMode.STATE: _state,
    ColorMode.OWNER: _owner,
    ColorMode.FILL: _fill,
    ColorMode.SHARING: _sharing,
    ColorMode.AGE: _age,
    ColorMode.ATTENTION: _attention,
}


def _table(colors: list[str], theme: Theme) -> Pixels:
    normal = _channels(colors)
    base = _channels([theme.base])
    by_emphasis = np.concatenate([normal + (base - normal) * _DIM, normal, normal])
    flashes = np.stack([_towards(by_emphasis, level, theme) for level in LEVELS])
    flashes[:, 0::NUM_KEYS] = base  # no block: never a flash
    covered = np.stack([base + (flashes - base) * share for share in COVERAGES])
    return _packed(covered)


def _towards(colors: npt.NDArray[np.float64], level: FlashLevel, theme: Theme) -> npt.NDArray[np.float64]:
    share = level.share_dark if theme.is_dark else level.share_light
    return colors + (_channels([getattr(theme, level.color)]) - colors) * share


def _channels(colors: list[str]) -> npt.NDArray[np.float64]:
    values = [int(color[1:], 16) for color in colors]
    return np.array([(v >> 16, v >> 8 & 255, v & 255) for v in values], np.float64)


def _packed(channels: npt.NDArray[np.float64]) -> Pixels:
    parts = np.rint(channels).astype(np.uint32)
    red, green, blue = (parts[..., index] for index in range(3))
    packed: Pixels = np.bitwise_or(red << np.uint32(16) | green << np.uint32(8) | blue, np.uint32(0xFF000000))
    return packed

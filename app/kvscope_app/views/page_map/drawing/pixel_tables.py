"""Colours of the page map as lookup tables from rank to pixel.

A *rank* is `emphasis * 256 + key`. Where blocks share a pixel, the highest rank is shown: blocks of the selected
request win, then the higher key. A pixel is `0xffRRGGBB`.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.theme import Theme, readable_on
from kvscope_app.views.page_map.color_modes import NUM_KEYS, ColorMode, hollow
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES, FlashKind, FlashLevel

Pixels = npt.NDArray[np.uint32]

COVERAGES: Final = (1.0, 0.66, 0.33)
"""Shares of a pixel that a cell's rounded corner covers, for antialiasing."""
_DIM_SHARE: Final = 0.68


class Emphasis(IntEnum):
    """Emphasis of a block; the value is the high byte of its rank."""

    DIMMED = 0
    NORMAL = 1
    SELECTED = 2


class PixelTables:
    """Lookup tables from rank to pixel for one colour mode in one theme, and the colours of marks."""

    def __init__(self, mode: ColorMode, theme: Theme) -> None:
        self.background: int = pixel(theme.base)
        self.outline: int = pixel(theme.selection)
        self.mark: int = pixel(theme.selection)
        self.empty_outline: int = pixel(theme.block_free)
        self.glyphs = {kind: pixel(glyph_color(kind, theme)) for kind in MOVES}
        colors = mode.key_colors(theme)
        self.solid: Pixels = _table(colors, theme)
        """Pixels of filled slots, indexed by [coverage, flash level, rank]."""
        self.hollow: Pixels = _table([hollow(color, theme) for color in colors], theme)
        """Pixels of empty slots, indexed by [coverage, flash level, rank]."""


@lru_cache(maxsize=4)
def cached_tables(mode: ColorMode, theme: Theme) -> PixelTables:
    """Return the tables of `mode` in `theme`. They are shared, so callers must not modify them."""
    return PixelTables(mode, theme)


def pixel(color: str) -> int:
    """Return `#rrggbb` as an opaque RGB32 pixel."""
    return 0xFF000000 | int(color[1:], 16)


def glyph_color(kind: FlashKind, theme: Theme) -> str:
    return readable_on(str(getattr(theme, f"flash_{kind.name.lower()}")), theme)


def _table(colors: list[str], theme: Theme) -> Pixels:
    normal = _channels(colors)
    base = _channels([theme.base])
    by_emphasis = np.concatenate([normal + (base - normal) * _DIM_SHARE, normal, normal])
    flashes = np.stack([_blend(by_emphasis, level, theme) for level in LEVELS])
    flashes[:, 0::NUM_KEYS] = base  # no block: never a flash
    with_coverage = np.stack([base + (flashes - base) * share for share in COVERAGES])
    return _pack(with_coverage)


def _blend(colors: npt.NDArray[np.float64], level: FlashLevel, theme: Theme) -> npt.NDArray[np.float64]:
    share = level.share_dark if theme.is_dark else level.share_light
    return colors + (_channels([getattr(theme, level.color)]) - colors) * share


def _channels(colors: list[str]) -> npt.NDArray[np.float64]:
    values = [int(color[1:], 16) for color in colors]
    return np.array([(v >> 16, v >> 8 & 255, v & 255) for v in values], np.float64)


def _pack(channels: npt.NDArray[np.float64]) -> Pixels:
    values = np.rint(channels).astype(np.uint32)
    red, green, blue = (values[..., index] for index in range(3))
    pixels: Pixels = np.bitwise_or(red << np.uint32(16) | green << np.uint32(8) | blue, np.uint32(0xFF000000))
    return pixels

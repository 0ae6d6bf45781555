"""Glyphs in cells that flash for a block move, for users who cannot distinguish the colours. Uses numpy only.

An evicted block has a cross, a copied one a plus, one saved to a lower tier an arrowhead down, one loaded from there an
arrowhead up.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.page_map.drawing.flash_kinds import FlashKind

MIN_PITCH_FOR_GLYPH: Final = 11
"""Minimum cell pitch for a glyph, in pixels."""


def glyph(kind: FlashKind, size: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the glyph's pixels, shape (size, size). `size` must be odd. `CHANGED` has no glyph."""
    middle = size // 2
    y, x = np.mgrid[-middle : middle + 1, -middle : middle + 1]
    half = size // 10  # half of the stroke width
    shapes: dict[FlashKind, npt.NDArray[np.bool_]] = {
        FlashKind.EVICTED: (np.abs(np.abs(x) - np.abs(y)) <= half),
        FlashKind.COPIED: (np.abs(x) <= half) | (np.abs(y) <= half),
        FlashKind.SAVED: (np.abs(x) <= (middle - y) // 2) & (y > -middle),
        FlashKind.LOADED: (np.abs(x) <= (middle + y) // 2) & (y < middle),
    }
    return shapes.get(kind, np.zeros((size, size), np.bool_))


def glyph_pixels(kind: FlashKind, pitch: int, low: int, width: int) -> npt.NDArray[np.int64]:
    """Return the glyph's indices in the flattened `pitch` x `pitch` pixels of one cell with its gap; empty if these are
    too few for a glyph.

    The cell's square starts at pixel `low` and is `width` pixels wide and high.
    """
    if pitch < MIN_PITCH_FOR_GLYPH:
        return np.empty(0, np.int64)
    size = max(5, width // 2)
    size -= 1 - size % 2
    top = low + (width - size) // 2
    ys, xs = np.nonzero(glyph(kind, size))
    return (ys + top) * pitch + xs + top

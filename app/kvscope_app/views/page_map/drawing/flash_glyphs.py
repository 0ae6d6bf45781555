"""The sign in a cell that flashes for a move, for eyes that do not tell the colours: numpy alone.

An evicted block carries a cross, a copied one a plus, one that was saved to a lower tier an arrowhead down, one that
came back an arrowhead up.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.page_map.drawing.flash_kinds import FlashKind

GLYPHS_FROM: Final = 11
"""Pixels of pitch from which a cell has room for a sign."""


def glyph(kind: FlashKind, size: int) -> npt.NDArray[np.bool_]:
    """The sign's pixels, shape (size, size), `size` odd."""
    middle = size // 2
    y, x = np.mgrid[-middle : middle + 1, -middle : middle + 1]
    half = size // 10  # of a stroke's width
    shapes: dict[FlashKind, npt.NDArray[np.bool_]] = {
        FlashKind.EVICTED: (np.abs(np.abs(x) - np.abs(y)) <= half),
        FlashKind.COPIED: (np.abs(x) <= half) | (np.abs(y) <= half),
        FlashKind.SAVED: (np.abs(x) <= (middle - y) // 2) & (y > -middle),
        FlashKind.LOADED: (np.abs(x) <= (middle + y) // 2) & (y < middle),
    }
    return shapes.get(kind, np.zeros((size, size), np.bool_))


def glyph_places(kind: FlashKind, pitch: int, low: int, width: int) -> npt.NDArray[np.int64]:
    """Flat pixels of the sign in a `pitch` x `pitch` tile whose cell is `width` wide from `low` on."""
    if pitch < GLYPHS_FROM:
        return np.empty(0, np.int64)
    size = max(5, width // 2)
    size -= 1 - size % 2
    top = low + (width - size) // 2
    ys, xs = np.nonzero(glyph(kind, size))
    return (ys + top) * pitch + xs + top

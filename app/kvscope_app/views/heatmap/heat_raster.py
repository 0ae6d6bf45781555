"""Picture of a key store: one pixel buffer that is scrolled, so that only changed columns are drawn.

Imports no Qt. Columns are time, rows are cells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.heatmap.address_rows import highest, picture_rows
from kvscope_app.views.heatmap.cell_keys import GAP
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.time_scale import TimeScale
from kvscope_app.views.page_map.drawing.ink import Pixels

HATCH_EVERY: Final = 8
"""Spacing of the hatching of gaps in time, which no key colour could represent."""


class HeatRaster:
    """Row-major `0xffRRGGBB` pixels of `store` for the times of `scale`."""

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((1, 1), np.uint32)
        self.num_drawn = 0
        """Total number of columns drawn."""
        self._scale = TimeScale()
        self._store: KeyStore | None = None
        self._colors: Pixels = np.zeros(256, np.uint32)
        self._gap = (0, 0)
        self._is_stale = True

    def set_colors(self, colors: Pixels, gap: int, hatch: int) -> None:
        """Set the pixel of each key, and the background and line pixels of gaps."""
        self._colors, self._gap, self._is_stale = colors, (gap, hatch), True

    def invalidate(self) -> None:
        self._is_stale = True

    def draw(self, store: KeyStore, scale: TimeScale, height: int, from_ns: int | None = None) -> int:
        """Draw missing columns, and all from `from_ns` on. Returns the number of columns drawn."""
        size = (max(height, 1), max(scale.width, 1))
        if self.pixels.shape != size:
            self.pixels = np.zeros(size, np.uint32)  # the caller drops the image of the old buffer
            self._is_stale = True
        moved = scale.first - self._scale.first
        is_same = store is self._store and replace(self._scale, first=0) == replace(scale, first=0)
        before = self.num_drawn
        self._store, self._scale = store, scale
        if self._is_stale or not is_same or abs(moved) >= scale.width:
            self._draw_columns(0, scale.width)
        else:
            self._scroll(moved, from_ns)
        self._is_stale = False
        return self.num_drawn - before

    def _scroll(self, moved: int, from_ns: int | None) -> None:
        width = self._scale.width
        fresh = width
        if moved > 0:
            self.pixels[:, :-moved] = self.pixels[:, moved:]
            fresh = width - moved
        elif moved < 0:
            self.pixels[:, -moved:] = self.pixels[:, :moved]
            self._draw_columns(0, -moved)
        if from_ns is not None:
            fresh = min(fresh, max(from_ns // self._scale.column_ns - self._scale.first, 0))
        if fresh < width:
            self._draw_columns(fresh, width)

    def _draw_columns(self, first: int, last: int) -> None:
        assert self._store is not None, "nothing to draw"
        keys = self._store.columns(self._scale, first, last)
        height = self.pixels.shape[0]
        if not keys.size:
            keys = np.zeros((last - first, max(self._store.num_cells, 1)), np.uint8)
        rows = highest(keys, *picture_rows(keys.shape[1], height), axis=1)
        self.pixels[:, first:last] = self._colors[rows].T
        columns = np.flatnonzero((keys.max(axis=1) == GAP) & self._is_within(first, last)) + first
        self.pixels[:, np.flatnonzero(keys.max(axis=1) == GAP) + first] = self._gap[0]
        if columns.size:
            phase = np.arange(height)[:, None] + (columns + self._scale.first)[None]
            self.pixels[:, columns] = np.where(phase % HATCH_EVERY == 0, self._gap[1], self._gap[0])
        self.num_drawn += last - first

    def _is_within(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the columns between the first and the last second; time outside is not a gap."""
        assert self._store is not None, "nothing to draw"
        begins = (self._scale.first + np.arange(first, last)) * self._scale.column_ns
        within: npt.NDArray[np.bool_] = (begins >= self._store.first_ns) & (begins < self._store.last_ns)
        return within

"""Pixels of the heatmap. The pixel buffer is scrolled, so that only changed columns are drawn.

Columns are time, rows are cells. Imports no Qt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.heatmap.address_rows import max_over_ranges, picture_rows
from kvscope_app.views.heatmap.cell_keys import GAP
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.time_scale import TimeScale
from kvscope_app.views.page_map.drawing.pixel_tables import Pixels

HATCH_EVERY: Final = 8
"""Spacing in pixels of the hatching of seconds without data, which distinguishes them from any colour."""


class HeatRaster:
    """Pixels (`0xffRRGGBB`, shape (height, width)) of the cell keys in a `KeyStore`, for the times of a `TimeScale`."""

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((1, 1), np.uint32)
        self.num_drawn = 0
        self._scale = TimeScale()
        self._store: KeyStore | None = None
        self._colors: Pixels = np.zeros(256, np.uint32)
        self._gap_pixels = (0, 0)
        self._is_stale = True

    def set_colors(self, colors: Pixels, gap: int, hatch: int) -> None:
        """Set the pixel of each cell key, shape (256,), and the background and line pixels of gaps."""
        self._colors, self._gap_pixels, self._is_stale = colors, (gap, hatch), True

    def invalidate(self) -> None:
        self._is_stale = True

    def draw(self, store: KeyStore, scale: TimeScale, height: int, from_ns: int | None = None) -> int:
        """Draw missing columns, and the columns from `from_ns` on. Returns the number of columns drawn."""
        size = (max(height, 1), max(scale.width, 1))
        if self.pixels.shape != size:
            self.pixels = np.zeros(size, np.uint32)  # the caller drops the image of the old buffer
            self._is_stale = True
        num_columns = scale.first - self._scale.first
        is_same = store is self._store and replace(self._scale, first=0) == replace(scale, first=0)
        num_before = self.num_drawn
        self._store, self._scale = store, scale
        if self._is_stale or not is_same or abs(num_columns) >= scale.width:
            self._draw_columns(0, scale.width)
        else:
            self._scroll(num_columns, from_ns)
        self._is_stale = False
        return self.num_drawn - num_before

    def _scroll(self, num_columns: int, from_ns: int | None) -> None:
        width = self._scale.width
        first_new = width
        if num_columns > 0:
            self.pixels[:, :-num_columns] = self.pixels[:, num_columns:]
            first_new = width - num_columns
        elif num_columns < 0:
            self.pixels[:, -num_columns:] = self.pixels[:, :num_columns]
            self._draw_columns(0, -num_columns)
        if from_ns is not None:
            first_new = min(first_new, max(from_ns // self._scale.column_ns - self._scale.first, 0))
        if first_new < width:
            self._draw_columns(first_new, width)

    def _draw_columns(self, first: int, last: int) -> None:
        assert self._store is not None, "nothing to draw"
        keys = self._store.columns(self._scale, first, last)
        height = self.pixels.shape[0]
        if not keys.size:
            keys = np.zeros((last - first, max(self._store.num_cells, 1)), np.uint8)
        rows = max_over_ranges(keys, *picture_rows(keys.shape[1], height), axis=1)
        self.pixels[:, first:last] = self._colors[rows].T
        gaps = np.flatnonzero((keys.max(axis=1) == GAP) & self._is_within(first, last)) + first
        self.pixels[:, np.flatnonzero(keys.max(axis=1) == GAP) + first] = self._gap_pixels[0]
        if gaps.size:
            phase = np.arange(height)[:, None] + (gaps + self._scale.first)[None]
            self.pixels[:, gaps] = np.where(phase % HATCH_EVERY == 0, self._gap_pixels[1], self._gap_pixels[0])
        self.num_drawn += last - first

    def _is_within(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return for each column from `first` to `last` whether it is in the recorded time, shape (last - first,)."""
        assert self._store is not None, "nothing to draw"
        start_ns = (self._scale.first + np.arange(first, last)) * self._scale.column_ns
        is_within: npt.NDArray[np.bool_] = (start_ns >= self._store.first_ns) & (start_ns < self._store.last_ns)
        return is_within

"""Conversion of a block's history to pixels: for each column, the colour and fill of the block's state. Uses numpy
only.

Drawing time depends on the number of pixels, not on the number of history rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtGui import QColor

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import NUM_OWNER_COLORS, Theme, mix, owner_colors
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import LOWER_TIERS, NO_OWNER, STATE_TIERS, BlockState
from kvscope_telemetry.summaries.block_changes import ChangeKind, Rows

_NO_VALUES: Final = np.empty(0, np.int64)
Pixels = npt.NDArray[np.uint32]


class BlockHistoryPicture:
    def __init__(self, theme: Theme) -> None:
        self._background = QColor(theme.block_free).rgba()
        self._unknown = (QColor(theme.base).rgba(), QColor(mix(theme.border, theme.base, 0.4)).rgba())
        names = ("block_free", "block_active", "block_shared", "block_cached", "block_unmapped")
        lower = [TIER_STYLES[tier].color for tier in LOWER_TIERS]
        self._colors = np.array([QColor(str(getattr(theme, name))).rgba() for name in (*names, *lower)], np.uint32)
        self._owners = np.array([QColor(color).rgba() for color in owner_colors(theme)], np.uint32)
        self._kind: npt.NDArray[np.int64] = _NO_VALUES
        self._share: npt.NDArray[np.float64] = np.empty(0)
        self._owner: npt.NDArray[np.int64] = _NO_VALUES

    def draw(self, rows: Rows, span: TimeSpan, width: int, block_size: int) -> None:
        """Compute `width` columns of `span`. A column shows the state at its right edge."""
        ends = span.begin_ns + (np.arange(1, width + 1) * (span.length_ns / width)).astype(np.int64)
        indices = np.searchsorted(rows["time_ns"], ends, "right") - 1
        rows_at_ends = rows[np.maximum(indices, 0)]
        is_known = (indices >= 0) & (rows_at_ends["how"] != ChangeKind.LOST)
        kind = _KINDS[np.minimum(rows_at_ends["state"], 4)]
        kind[(kind == 1) & (rows_at_ends["ref_count"] > 1)] = 2
        has_content = (kind > 0) & (kind < 4)
        for color_index, tier in enumerate(LOWER_TIERS, start=5):
            kind[has_content & (rows_at_ends["tier"] == tier)] = color_index
        self._kind = np.where(is_known, kind, -1)
        filled = np.where(np.isin(rows_at_ends["tier"], STATE_TIERS), block_size, rows_at_ends["filled"])
        self._share = np.where(has_content, np.minimum(filled / max(block_size, 1), 1.0), 0.0)
        self._owner = np.where(is_known & has_content, rows_at_ends["owner"], NO_OWNER).astype(np.int64)

    def state_pixels(self, height: int) -> Pixels:
        """Return the pixels of the block's state over time, shape (height, width).

        Each column is filled up to the block's filled share, and hatched where the state is unknown.
        """
        filled_rows = np.maximum(np.ceil(self._share * height), np.where(self._kind == 4, height, 0))
        colors = self._colors[np.maximum(self._kind, 0)]
        y = np.arange(height)[:, None]
        pixels: Pixels = np.where(y >= height - filled_rows, colors, np.uint32(self._background)).astype(np.uint32)
        unknown = self._kind < 0
        if unknown.any():
            x = np.arange(self._kind.size)
            hatched = np.where((x + y) % 8 < 2, np.uint32(self._unknown[1]), np.uint32(self._unknown[0]))
            pixels[:, unknown] = hatched[:, unknown]
        return np.ascontiguousarray(pixels)

    def owner_pixels(self) -> Pixels:
        """Return the owner's colour in each column, transparent without an owner; shape (width,)."""
        pixels: Pixels = np.where(self._owner < 0, np.uint32(0), self._owners[self._owner % NUM_OWNER_COLORS])
        return pixels.astype(np.uint32)

    def owner_runs(self, min_width: int) -> list[tuple[int, int, int]]:
        """Return (first column, end, owner) of each run of columns with one owner that is at least `min_width` columns
        wide.
        """
        if not self._owner.size:
            return []
        starts = np.flatnonzero(np.diff(self._owner)) + 1
        begins, ends = np.concatenate(([0], starts)), np.concatenate((starts, [self._owner.size]))
        is_wide = (ends - begins >= min_width) & (self._owner[begins] != NO_OWNER)
        begins, ends = begins[is_wide], ends[is_wide]
        return list(zip(begins.tolist(), ends.tolist(), self._owner[begins].tolist(), strict=True))


_KINDS: Final = np.array([0, 1, 3, 4, 0])
"""Index into `_colors` by `BlockState`. Unknown states are drawn as free."""
assert (BlockState.FREE, BlockState.ACTIVE, BlockState.CACHED, BlockState.UNMAPPED) == (0, 1, 2, 3)

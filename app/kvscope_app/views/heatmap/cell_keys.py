"""One-byte keys of the heatmap's cells, one for each bin and second, in four modes. Imports no Qt.

A key determines the colour. If several cells share a pixel, the highest key is shown, so important states have higher
keys. Key 0 means a second without data, key 1 an address that did not exist, and key 2 a bin with only free blocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.theme import Theme, mix
from kvscope_app.views.heatmap.address_rows import NO_ADDRESS
from kvscope_app.views.page_map import color_modes as page_map
from kvscope_app.views.page_map.drawing.pixel_tables import Pixels, pixel
from kvscope_app.views.tier_style import distinct_tier_colors
from kvscope_telemetry.summaries.session_overview import SessionOverview

Keys = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
GAP: Final = 0
FREE: Final = 2
LEVELS: Final = 16
"""Number of shades per colour. The shade shows how much of a bin of addresses is in use."""
_MIN_STRENGTH: Final = 0.45
"""Fraction of a state's colour in its faintest shade, 0 to 1. The remainder is the colour of free blocks.

One used block among thousands is visible at this fraction.
"""
_UNREFERENCED_KEY: Final = 3
_FIRST_OWNER_KEY: Final = 128


class HeatMode(StrEnum):
    STATE = "state"
    USED = "used slots"
    OWNER = "owner"
    TIER = "tier"


_STATES: Final = (
    page_map.DISK_CACHED,
    page_map.HOST_CACHED,
    page_map.DISK,
    page_map.HOST,
    page_map.CACHED,
    page_map.ACTIVE,
    page_map.SHARED,
)
"""Page map keys of the block states.

A heatmap key is `_FIRST_STATE_KEY` + (index in this tuple) * `LEVELS` + shade.
"""
_FIRST_STATE_KEY: Final = 16
_ACTIVE: Final = np.array([5, 3, 2, 5, 3], np.uint8)
_CACHED: Final = np.array([4, 1, 0, 4, 1], np.uint8)
_SHARED: Final = np.array([6, 3, 2, 6, 3], np.uint8)
"""Index in `_STATES` of the state "shared", by tier. `_ACTIVE` and `_CACHED` have the indices of "active" and
"cached".
"""


def cell_keys(mode: HeatMode, overview: SessionOverview, indices: IntArray, tiers: IntArray) -> Keys:
    """Return the cell key of each address bin in each second, shape (n, bins).

    Args:
        mode: Quantity that the colours show.
        overview: Figures per second.
        indices: Indices of the seconds in `overview`, shape (n,). All must have the same number of bins.
        tiers: Tier of each bin, shape (bins,).
    """
    active, cached = (np.asarray(overview.bins(name, indices), np.uint8) for name in ("active", "cached"))
    if active.shape[1] != tiers.size:
        return np.full((len(indices), tiers.size), GAP, np.uint8)
    if mode is HeatMode.USED:
        return _used_keys(active, cached, np.asarray(overview.bins("filled", indices), np.uint8))
    if mode is HeatMode.OWNER:
        return _owner_keys(cached, np.asarray(overview.bins("owner", indices), np.int32), active)
    if mode is HeatMode.TIER:
        in_use = np.minimum(active.astype(np.int16) + cached, 255)
        return _with_level(np.broadcast_to(tiers[None], in_use.shape), in_use)
    shared = np.asarray(overview.bins("shared", indices), np.uint8)
    state = np.where(active > 0, _ACTIVE[tiers], _CACHED[tiers])
    # keep uint8: two hours have seven million bins
    state = np.where((shared > 0) & (active > 0), _SHARED[tiers], state)
    return _with_level(state, np.where(active > 0, active, cached))


def key_pixels(mode: HeatMode, theme: Theme) -> Pixels:
    colors = [theme.base] * 256
    colors[NO_ADDRESS] = theme.base
    colors[FREE] = theme.block_free
    _FILLERS[mode](colors, theme)
    return np.array([pixel(color) for color in colors], np.uint32)


def unreferenced_color(theme: Theme) -> str:
    """Return the colour, in owner mode, of an address bin with cached blocks that no request holds."""
    return mix(theme.block_cached, theme.block_free, 0.62)


def _with_level(kinds: npt.NDArray[np.integer], shares: npt.NDArray[np.integer]) -> Keys:
    """Return the cell keys of the colours `kinds`, each with a shade for its share (0 to 255), or `FREE` if the share
    is 0.

    `kinds` are indices in `_STATES` or, if the heatmap shows tiers, tiers.
    """
    keys = (
        (kinds.astype(np.uint8, copy=False) << 4)
        + (shares.astype(np.uint8, copy=False) >> 4)
        + np.uint8(_FIRST_STATE_KEY)
    )
    keys[shares == 0] = FREE
    return keys


def _used_keys(active: Keys, cached: Keys, filled: Keys) -> Keys:
    in_use = active.astype(np.float32) + cached.astype(np.float32)
    empty_share = 1 - np.minimum(filled.astype(np.float32) / np.maximum(in_use, 1), 1)
    keys = page_map.FILL_FULL + np.rint(empty_share * page_map.FILL_STEPS)
    return np.where(in_use > 0, keys, FREE).astype(np.uint8)


def _owner_keys(cached: Keys, owner: npt.NDArray[np.int32], active: Keys) -> Keys:
    keys = np.where(cached > 0, np.uint8(_UNREFERENCED_KEY), np.uint8(FREE))
    referenced = _FIRST_OWNER_KEY + owner % page_map.NUM_OWNER_KEYS
    return np.where((owner >= 0) & (active > 0), referenced, keys).astype(np.uint8)


def _fill_levels(colors: list[str], theme: Theme, full_colors: list[str]) -> None:
    for index, color in enumerate(full_colors):
        for level in range(LEVELS):
            strength = _MIN_STRENGTH + (1 - _MIN_STRENGTH) * level / (LEVELS - 1)
            colors[_FIRST_STATE_KEY + index * LEVELS + level] = mix(theme.block_free, color, strength)


def _state_colors(colors: list[str], theme: Theme) -> None:
    map_colors = page_map.STATE.key_colors(theme)
    _fill_levels(colors, theme, [map_colors[key] for key in _STATES])


def _tier_colors(colors: list[str], theme: Theme) -> None:
    _fill_levels(colors, theme, list(distinct_tier_colors(theme).values()))


def _used_colors(colors: list[str], theme: Theme) -> None:
    map_colors = page_map.FILL.key_colors(theme)
    for key in range(page_map.FILL_FULL, page_map.FILL_FULL + page_map.FILL_STEPS + 1):
        colors[key] = map_colors[key]


def _owner_colors(colors: list[str], theme: Theme) -> None:
    map_colors = page_map.OWNER.key_colors(theme)
    colors[_UNREFERENCED_KEY] = unreferenced_color(theme)
    for index in range(page_map.NUM_OWNER_KEYS):
        colors[_FIRST_OWNER_KEY + index] = map_colors[page_map.OWNER_ACTIVE + index]


_FILLERS: Final = {
    HeatMode.STATE: _state_colors,
    HeatMode.USED: _used_colors,
    HeatMode.OWNER: _owner_colors,
    HeatMode.TIER: _tier_colors,
}

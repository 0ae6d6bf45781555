"""Temporary colour mode of the page map that shows which blocks two texts share. Imports no widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvscope_app.session.session_selection import BlockComparison
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.views.page_map.color_modes import FREE, UNMAPPED, ColorMode, Keys, Rows
from kvscope_app.views.page_map.legend_items import LegendSwatch, ShownItems
from kvscope_telemetry.ledger import BlockState, Ledger

OTHER: Final = 3
ONLY_SECOND: Final = 4
ONLY_FIRST: Final = 5
IN_BOTH: Final = 6
_OTHER_SHARE: Final = 0.75


def comparison_mode(comparison: BlockComparison) -> ColorMode:
    """Return a colour mode for the blocks of two texts, found by their hashes, so that it stays true while blocks are
    evicted and computed again.
    """
    in_both = np.intersect1d(comparison.first, comparison.second)
    only_first = np.setdiff1d(comparison.first, in_both)
    only_second = np.setdiff1d(comparison.second, in_both)
    hashes = np.concatenate([only_second, only_first, in_both])
    keys = np.repeat(
        np.array([ONLY_SECOND, ONLY_FIRST, IN_BOTH], np.uint8), [only_second.size, only_first.size, in_both.size]
    )
    order = np.argsort(hashes)
    hashes, keys = hashes[order], keys[order]

    def block_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
        state, block_hashes = ledger.state[rows], ledger.hash[rows]
        result = np.full(state.size, OTHER, np.uint8)
        if hashes.size:
            index = np.minimum(np.searchsorted(hashes, block_hashes), hashes.size - 1)
            result = np.where(hashes[index] == block_hashes, keys[index], result)
        result[state == BlockState.FREE] = FREE
        result[state == BlockState.UNMAPPED] = UNMAPPED
        return result

    def colors(theme: Theme) -> Mapping[int, str]:
        return {
            OTHER: mix(theme.block_active, theme.block_free, _OTHER_SHARE),
            ONLY_SECOND: theme.series[1],
            ONLY_FIRST: theme.series[0],
            IN_BOTH: theme.block_shared,
        }

    def swatches(theme: Theme, shown: ShownItems) -> Sequence[LegendSwatch]:
        by_key = colors(theme)
        return [
            LegendSwatch(by_key[IN_BOTH], f"in both: {plural(in_both.size, 'block')}"),
            LegendSwatch(by_key[ONLY_FIRST], f"only {comparison.first_label}: {plural(only_first.size, 'block')}"),
            LegendSwatch(by_key[ONLY_SECOND], f"only {comparison.second_label}: {plural(only_second.size, 'block')}"),
            LegendSwatch(by_key[OTHER], "other"),
        ]

    return ColorMode("comparison", "Blocks that two texts share", block_keys, colors, swatches)

"""Maps rows of a ledger to tiers: the only definition of where the rows of each tier are.

The block pool and the mirror lay out their ledgers by it, and views use it to identify rows. Knows neither the contents
of the rows nor the names of the tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import STATE_TIERS, Ledger, Tier

TIER_ORDER: Final[tuple[Tier, ...]] = (Tier.HBM, Tier.HOST, Tier.DISK, Tier.UNKNOWN, Tier.STATES, Tier.HOST_STATES)
"""Order of the tiers in a ledger. `CacheInfo` counts rows of an unknown tier among those on disk, which they follow."""
BLOCK_TIERS: Final[tuple[Tier, ...]] = tuple(tier for tier in TIER_ORDER if tier not in STATE_TIERS)
"""Tiers whose rows are blocks of tokens, nearest first; unknown ones last."""


class TierRows:
    """Ranges of rows of each tier of a ledger. The rows of a tier are contiguous, in the order of `TIER_ORDER`.

    Args:
        sizes: Number of rows by tier; missing tiers have none.
    """

    __slots__ = ("_ranges", "num_rows", "present")

    def __init__(self, sizes: Mapping[Tier, int]) -> None:
        self._ranges: dict[Tier, range] = {}
        end = 0
        for tier in TIER_ORDER:
            start, end = end, end + sizes.get(tier, 0)
            self._ranges[tier] = range(start, end)
        self.num_rows = end
        self.present = {tier: rows for tier, rows in self._ranges.items() if rows or tier is Tier.HBM}
        """The pool and each tier that has rows, in the order of the ledger."""

    def __getitem__(self, tier: Tier) -> range:
        """Return the rows of `tier`; if there are none, an empty range at the position where they would be."""
        return self._ranges[tier]

    @property
    def first_state(self) -> int:
        """The first row of recurrent states; the number of rows before them, if there are none."""
        return self._ranges[Tier.STATES].start

    def tier_of(self, row: int) -> Tier:
        """Return the tier of `row` (>= 0); `Tier.UNKNOWN` past the last row."""
        return next((tier for tier, rows in self.present.items() if row < rows.stop), Tier.UNKNOWN)

    def tiers_of(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
        """Return the tier of each of `rows`, shape (n,), as `tier_of`."""
        ends = [part.stop for part in self.present.values()]
        tiers: npt.NDArray[np.uint8] = np.array([*self.present, Tier.UNKNOWN], np.uint8)
        return tiers[np.searchsorted(ends, rows, "right")]

    def count(self, rows: npt.NDArray[np.integer]) -> dict[Tier, int]:
        return {
            tier: int(np.count_nonzero((rows >= part.start) & (rows < part.stop)))
            for tier, part in self.present.items()
        }

    def write_tiers(self, ledger: Ledger) -> None:
        for tier, rows in self.present.items():
            ledger.tier[rows.start : rows.stop] = tier

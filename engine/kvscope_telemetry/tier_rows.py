"""Maps the rows of a ledger to tiers: the only definition of where the rows of each tier are.

The block pool and the mirror use this mapping to lay out their ledgers, and views use it to identify rows. The contents
of rows and the names of tiers are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import STATE_TIERS, Ledger, Tier

TIER_ORDER: Final[tuple[Tier, ...]] = (Tier.HBM, Tier.HOST, Tier.DISK, Tier.UNKNOWN, Tier.STATES, Tier.HOST_STATES)
"""Order of the tiers in a ledger. Rows of an unknown tier follow the disk rows, and `CacheInfo` counts them as
disk rows.
"""
BLOCK_TIERS: Final[tuple[Tier, ...]] = tuple(tier for tier in TIER_ORDER if tier not in STATE_TIERS)
"""Tiers whose rows are blocks of tokens, nearest tier first and the unknown tier last."""


class TierRows:
    """Maps each tier to its range of ledger rows. The rows of a tier are contiguous, in the order of `TIER_ORDER`.

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
        """Row ranges of `Tier.HBM` and of every other tier that has rows, in ledger order."""

    def __getitem__(self, tier: Tier) -> range:
        """Return the rows of `tier`. A tier without rows has an empty range at the position where its rows would be."""
        return self._ranges[tier]

    @property
    def first_state(self) -> int:
        """Index of the first row of recurrent states. If there are none, the number of rows before them."""
        return self._ranges[Tier.STATES].start

    def tier_of(self, row: int) -> Tier:
        """Return the tier of `row` (>= 0); `Tier.UNKNOWN` past the last row."""
        return next((tier for tier, rows in self.present.items() if row < rows.stop), Tier.UNKNOWN)

    def tiers_of(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
        """Return the tier of each of `rows`, shape (n,), as `tier_of` does."""
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

"""Estimates how long a copy takes from earlier copies, weighted by recency and size."""

from __future__ import annotations

from typing import Final

HALF_LIFE_BLOCKS: Final = 256
"""Number of copied blocks after which the weight of an earlier measurement is halved."""


class CopySpeed:
    """Estimated seconds per block of one kind of copy, and the total blocks and seconds of these copies."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.seconds = 0.0
        self._recent_blocks = 0.0
        self._recent_seconds = 0.0

    @property
    def seconds_per_block(self) -> float:
        """Weighted average over copies, in which recent ones count most; 0 before the first copy."""
        return self._recent_seconds / self._recent_blocks if self._recent_blocks else 0.0

    def record_copy(self, num_blocks: int, seconds: float) -> None:
        self.num_blocks += num_blocks
        self.seconds += seconds
        retained_share = 0.5 ** (num_blocks / HALF_LIFE_BLOCKS)
        self._recent_blocks = self._recent_blocks * retained_share + num_blocks
        self._recent_seconds = self._recent_seconds * retained_share + seconds

    def reset_totals(self) -> None:
        """Reset the totals but not the estimated speed."""
        self.num_blocks, self.seconds = 0, 0.0

    def reset(self) -> None:
        self.reset_totals()
        self._recent_blocks, self._recent_seconds = 0.0, 0.0

"""Estimates how long a copy takes from earlier copies: recent ones count most, and large ones more than small ones."""

from __future__ import annotations

from typing import Final

HALF_LIFE_BLOCKS: Final = 256
"""After so many blocks what was measured before counts half."""


class CopySpeed:
    """Seconds a block of one kind of copy, and what was copied in all."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.seconds = 0.0
        self._recent_blocks = 0.0
        self._recent_seconds = 0.0

    @property
    def seconds_per_block(self) -> float:
        """Of recent copies; 0 before the first."""
        return self._recent_seconds / self._recent_blocks if self._recent_blocks else 0.0

    def add(self, num_blocks: int, seconds: float) -> None:
        """A copy that is over."""
        self.num_blocks += num_blocks
        self.seconds += seconds
        kept = 0.5 ** (num_blocks / HALF_LIFE_BLOCKS)
        self._recent_blocks = self._recent_blocks * kept + num_blocks
        self._recent_seconds = self._recent_seconds * kept + seconds

    def forget_totals(self) -> None:
        """Count from here on, with the speed known."""
        self.num_blocks, self.seconds = 0, 0.0

    def restart(self) -> None:
        """Forget everything: what was copied so far was practice."""
        self.forget_totals()
        self._recent_blocks, self._recent_seconds = 0.0, 0.0

"""Use of the tiers below the device's pool (host memory, disk), and the number of blocks moved between tiers. Imports
no Qt.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import LOWER_TIERS, BlockState, Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.mirror.mirror import Mirror


@dataclass(frozen=True, slots=True)
class TierOccupancy:
    """Numbers of blocks (or recurrent states) in one lower tier. `swapped`, `cached` and `free` add up to `size`."""

    tier: Tier
    size: int
    swapped: int
    """Number of blocks of swapped-out requests, which must not be evicted."""
    cached: int
    """Number of blocks of offloaded prefixes, which can be evicted."""
    block_bytes: int
    """Bytes per block; 0 if the engine does not report them."""

    @property
    def title(self) -> str:
        return TIER_STYLES[self.tier].title

    @property
    def free(self) -> int:
        return self.size - self.swapped - self.cached

    def num_bytes(self, num_blocks: int) -> int | None:
        return num_blocks * self.block_bytes if self.block_bytes else None


def tier_uses(mirror: Mirror) -> tuple[TierOccupancy, ...]:
    """Return the use of the lower tiers that the engine has, highest tier first. Takes O(1)."""
    if mirror.hello is None:
        return ()
    cache = mirror.hello.cache
    return tuple(
        TierOccupancy(
            tier,
            len(rows),
            mirror.count(BlockState.ACTIVE, tier),
            mirror.count(BlockState.CACHED, tier),
            cache.row_bytes(tier),
        )
        for tier, rows in cache.rows_by_tier.present.items()
        if tier in LOWER_TIERS
    )


def moved_text(counters: Counters, capabilities: Capabilities = OWN_ENGINE) -> str:
    if not capabilities.ref_counts:
        return f"{plural(counters.offloaded_blocks, 'block')} stored below; loads are not reported"
    parts = [
        f"{plural(counters.swapped_blocks, 'block')} swapped out",
        f"{count(counters.offloaded_blocks)} moved down",
        f"{count(counters.loaded_blocks)} loaded back",
    ]
    if counters.lost_blocks:
        parts.append(f"{count(counters.lost_blocks)} lost and recomputed")
    return "; ".join(filter(None, (", ".join(parts), _moved_states(counters))))


def _moved_states(counters: Counters) -> str:
    numbers = (
        (counters.swapped_states, "swapped out"),
        (counters.offloaded_states, "moved down"),
        (counters.loaded_states, "loaded back"),
    )
    parts = [f"{count(number)} {text}" for number, text in numbers if number]
    return f"recurrent states: {', '.join(parts)}" if parts else ""

"""Counts blocks by tier and state, and fragmentation, from a mirror. O(blocks)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import PoolUse, pool_use
from kvscope_telemetry.summaries.run_figures import USAGE


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Numbers of blocks of one tier. Used, cached and free blocks are disjoint. Shared blocks are included in the used
    ones.
    """

    tier: str
    """Name of the tier: "hbm", "host", "disk", "states" (recurrent states) or "host_states"."""
    num_blocks: int
    num_used: int
    num_shared: int
    num_cached: int
    num_free: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    epoch: int
    tiers: tuple[TierFigures, ...]
    slots: PoolUse
    num_pinned: int
    groups: tuple[tuple[int, int], ...] = ()
    """Numbers of used and of cached blocks (or recurrent states) on the device, one pair per KV group. Empty if
    the model has only one KV group.
    """

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that requests hold, 0 to 1."""
        pool = self.tiers[0]
        return USAGE.of({"active": pool.num_used, "pool": pool.num_blocks}) or 0.0


def pool_figures(mirror: Mirror) -> PoolFigures:
    assert mirror.hello is not None, "an engine was heard of"
    cache = mirror.hello.cache
    rows = cache.rows_by_tier.present
    pool = TierFigures(
        tier="hbm",
        num_blocks=cache.num_physical_blocks or cache.num_blocks,
        num_used=mirror.num_active,
        num_shared=_num_shared(mirror, rows[Tier.HBM]),
        num_cached=mirror.num_cached,
        num_free=mirror.num_available_blocks,
    )
    tiers = [pool, *(_lower_tier(mirror, tier, part) for tier, part in rows.items() if tier is not Tier.HBM)]
    return PoolFigures(
        epoch=mirror.hello.epoch,
        tiers=tuple(tiers),
        slots=pool_use(mirror),
        num_pinned=len(mirror.pinned),
        groups=_by_group(mirror, len(cache.groups)) if len(cache.groups) > 1 else (),
    )


def _lower_tier(mirror: Mirror, tier: Tier, rows: range) -> TierFigures:
    num_blocks = len(rows)
    used, cached = mirror.count(BlockState.ACTIVE, tier), mirror.count(BlockState.CACHED, tier)
    return TierFigures(
        tier=tier.name.lower(),
        num_blocks=num_blocks,
        num_used=used,
        num_shared=_num_shared(mirror, rows),
        num_cached=cached,
        num_free=max(0, num_blocks - used - cached),
    )


def _by_group(mirror: Mirror, num_groups: int) -> tuple[tuple[int, int], ...]:
    on_device = (mirror.ledger.tier == Tier.HBM) | (mirror.ledger.tier == Tier.STATES)
    group, state = mirror.ledger.group[on_device], mirror.ledger.state[on_device]
    used, cached = (
        np.bincount(group[state == kind], minlength=num_groups)[:num_groups].tolist()
        for kind in (BlockState.ACTIVE, BlockState.CACHED)
    )
    return tuple(zip(used, cached, strict=True))


def _num_shared(mirror: Mirror, rows: range) -> int:
    return int(np.count_nonzero(mirror.ledger.ref_count[rows.start : rows.stop] > 1))

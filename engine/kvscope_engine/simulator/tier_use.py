"""Use of the lower tiers in a run, as values for a table or JSON."""

from __future__ import annotations

import msgspec

from kvscope_engine.simulator.simulation import Simulation
from kvscope_engine.simulator.simulation_tally import SimulationTally
from kvscope_telemetry.ledger import Tier


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of blocks, and times for which the run waited. Hit rates are fractions of all prompt tokens, 0 to 1."""

    num_host_blocks: int
    """Capacity of host memory in blocks. `num_disk_blocks` is the capacity of the disk."""
    num_disk_blocks: int
    swapped_blocks: int
    """Blocks of preempted requests that were copied to host memory."""
    offloaded_blocks: int
    """Evicted blocks of the pool that were copied to host memory."""
    disk_blocks: int
    loaded_blocks: int
    """Swapped or offloaded blocks that were loaded to the pool."""
    loaded_from_disk_blocks: int
    """Blocks in `loaded_blocks` that were read from disk."""
    pool_hit_rate: float | None
    """Fraction of prompt tokens found in the pool. The sum of this, `host_hit_rate` and `disk_hit_rate` is the
    prefix hit rate.
    """
    host_hit_rate: float | None
    disk_hit_rate: float | None
    load_s: float
    """Seconds waited for loads from host memory to the pool."""
    disk_read_s: float
    """Seconds waited for reads from disk to host memory."""
    save_s: float
    """Seconds waited for copies to host memory that did not overlap with the forward pass."""
    disk_write_s: float
    """Seconds waited until the disk accepted offloaded blocks."""


def tier_use(simulation: Simulation) -> TierUse | None:
    mover, pool, totals = simulation.mover, simulation.pool, simulation.scheduler.totals
    if mover is None:
        return None
    moved, tally = mover.moved, simulation.tally
    host, disk = tally.num_loaded_tokens[Tier.HOST], tally.num_loaded_tokens[Tier.DISK]
    return TierUse(
        num_host_blocks=pool.num_host,
        num_disk_blocks=pool.num_disk,
        swapped_blocks=totals.swapped_blocks,
        offloaded_blocks=totals.offloaded_blocks,
        disk_blocks=moved.offloaded_blocks,
        loaded_blocks=totals.loaded_blocks,
        loaded_from_disk_blocks=moved.loaded_disk_blocks,
        pool_hit_rate=_share(tally, tally.num_cached_tokens - host - disk),
        host_hit_rate=_share(tally, host),
        disk_hit_rate=_share(tally, disk),
        load_s=moved.load_ns / 1e9,
        disk_read_s=moved.load_from_disk_ns / 1e9,
        save_s=moved.save_ns / 1e9,
        disk_write_s=moved.offload_ns / 1e9,
    )


def _share(tally: SimulationTally, num_tokens: int) -> float | None:
    return num_tokens / tally.num_prompt_tokens if tally.num_prompt_tokens else None

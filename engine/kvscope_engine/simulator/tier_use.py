"""What the lower tiers did in a run, as values for a table or JSON. Frozen."""

from __future__ import annotations

import msgspec

from kvscope_engine.simulator.simulation import Simulation
from kvscope_engine.simulator.tally import SimulationTally
from kvscope_telemetry.ledger import Tier


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of blocks, times are what the run stood still. Hit rates are shares of the prompts' tokens."""

    num_host_blocks: int
    """Places there."""
    num_disk_blocks: int
    swapped_blocks: int
    """Of preempted requests, to host memory."""
    offloaded_blocks: int
    """Evicted from the pool, to host memory."""
    disk_blocks: int
    """From host memory to disk."""
    loaded_blocks: int
    """Back to the pool, swapped or offloaded."""
    loaded_from_disk_blocks: int
    """Of these."""
    pool_hit_rate: float | None
    """This and the next two add up to the prefix hit rate."""
    host_hit_rate: float | None
    disk_hit_rate: float | None
    load_s: float
    """Waited for loads from host memory to the pool."""
    disk_read_s: float
    """Waited for the disk, before that."""
    save_s: float
    """Waited for saves, which otherwise run beside the forward pass."""
    disk_write_s: float
    """Waited for the disk to take what was offloaded."""


def tier_use(simulation: Simulation) -> TierUse | None:
    """Of a run that has ended; None for one without lower tiers."""
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
        loaded_from_disk_blocks=moved.risen_blocks,
        pool_hit_rate=_share(tally, tally.num_cached_tokens - host - disk),
        host_hit_rate=_share(tally, host),
        disk_hit_rate=_share(tally, disk),
        load_s=moved.load_ns / 1e9,
        disk_read_s=moved.rise_ns / 1e9,
        save_s=moved.save_ns / 1e9,
        disk_write_s=moved.offload_ns / 1e9,
    )


def _share(tally: SimulationTally, num_tokens: int) -> float | None:
    return num_tokens / tally.num_prompt_tokens if tally.num_prompt_tokens else None

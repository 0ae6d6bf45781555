"""Result of a run with one allocator, as values for a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvscope_engine.policy.allocation.mapped_pool import page_slots_of
from kvscope_engine.simulator.group_use import GroupUse
from kvscope_engine.simulator.memory_use import MemoryShares
from kvscope_engine.simulator.simulation import Simulation
from kvscope_engine.simulator.tier_use import TierUse, tier_use


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles over finished requests in seconds, interpolated linearly as by `numpy.percentile`."""

    p50: float
    p90: float
    p99: float


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one allocator. Rates are over `simulated_s`, from the first arrival to the end of the last request.

    Values computed from finished requests are None if no request finished. Values computed from steps under load (steps
    that left requests waiting) are None if there was no such step.
    """

    allocator: str
    question: str
    """Scenario in which the engine is changed (apart from the allocator): `NOT_FREED`, `EXPANDED`, or "" for none."""
    num_blocks: int
    block_bytes: int
    num_finished: int
    num_refused: int
    """Number of requests that could not run even alone. All other numbers of this report exclude them."""
    first_refusal: str
    num_steps: int
    num_steps_under_load: int
    simulated_s: float
    memory: MemoryShares | None
    mean_batch: float | None
    mean_batch_under_load: float | None
    """Mean number of requests per step, over steps under load."""
    requests_per_s: float | None
    output_tokens_per_s: float | None
    tokens_per_page_group: float | None
    """Number of tokens in one page group (one page for each layer); a request wastes less than that. None for
    allocators other than `virtual`.
    """
    num_preemptions: int
    num_preempted_requests: int
    num_recomputed_tokens: int
    num_evicted_blocks: int
    prefix_hit_rate: float | None
    """Fraction of the prompt tokens that were found in the prefix cache at the first admission, 0 to 1."""
    groups: tuple[GroupUse, ...]
    num_states: int
    """Number of slots for recurrent states. The next three fields count prefix checkpoints of states that were
    stored, restored and evicted.
    """
    num_states_kept: int
    num_states_restored: int
    num_states_evicted: int
    tiers: TierUse | None
    ttft_s: Percentiles | None
    latency_s: Percentiles | None
    normalized_latency_s: Percentiles | None
    """Latency divided by the number of output tokens."""


def make_report(simulation: Simulation) -> SimulationReport:
    tally, seconds = simulation.tally, simulation.now_ns / 1e9
    samples, states = tally.memory.num_samples, simulation.states
    return SimulationReport(
        allocator=simulation.allocator,
        question=simulation.setup.scenario,
        num_blocks=simulation.pool.num_blocks,
        block_bytes=simulation.setup.block_bytes,
        num_finished=tally.num_finished,
        num_refused=tally.num_refused,
        first_refusal=tally.first_refusal,
        num_steps=tally.num_steps,
        num_steps_under_load=samples,
        simulated_s=seconds,
        memory=tally.memory.shares(),
        mean_batch=_ratio(tally.num_scheduled, tally.num_steps),
        mean_batch_under_load=_ratio(tally.num_scheduled_under_load, samples),
        requests_per_s=_ratio(tally.num_finished, seconds),
        output_tokens_per_s=_ratio(tally.num_output_tokens, seconds),
        tokens_per_page_group=_tokens_per_page_group(simulation),
        num_preemptions=simulation.scheduler.totals.preemptions,
        num_preempted_requests=tally.num_preempted,
        num_recomputed_tokens=tally.num_recomputed_tokens,
        num_evicted_blocks=simulation.pool.evicted_blocks,
        prefix_hit_rate=_ratio(tally.num_cached_tokens, tally.num_prompt_tokens),
        groups=tally.groups.uses() if tally.groups is not None else (),
        num_states=states.num_slots if states is not None else 0,
        num_states_kept=states.num_kept if states is not None else 0,
        num_states_restored=states.num_restored if states is not None else 0,
        num_states_evicted=states.num_evicted if states is not None else 0,
        tiers=tier_use(simulation),
        ttft_s=_percentiles(tally.ttft_ns),
        latency_s=_percentiles(tally.total_ns),
        normalized_latency_s=_percentiles(tally.per_token_ns),
    )


def _tokens_per_page_group(simulation: Simulation) -> float | None:
    pages = page_slots_of(simulation.pool)
    return None if pages is None else float(pages.space.group_blocks * simulation.pool.block_size)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(values_ns: Sequence[float]) -> Percentiles | None:
    if not values_ns:
        return None
    p50, p90, p99 = np.percentile(np.asarray(values_ns, np.float64) / 1e9, (50, 90, 99)).tolist()
    return Percentiles(p50, p90, p99)

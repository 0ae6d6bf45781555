"""Simulations with lower tiers: what is offloaded and loaded, what it costs, and which allocators have tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.simulator.costs.cost_model import PRESETS, CostModel
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import SimulationReport, make_report
from kvscope_engine.simulator.workloads.generators import GeneratorOptions, generate
from kvscope_telemetry.errors import BadInput

Make = Callable[..., Simulation]
BLOCK = 16 << 20
"""Bytes of a block in the simulations calculated by hand: 4 slots of 4 MiB."""


@pytest.fixture
def cost(one_second_step: CostModel) -> CostModel:
    """Cost model in which a step takes 1 s, and a block 1/8 s on the link and 1/4 s to read from disk.

    Reading the KV cache has no cost.
    """
    return replace(
        one_second_step,
        kv_bytes_per_token=BLOCK / 4,
        memory_bandwidth=1e20,
        host_bandwidth=8 * BLOCK,
        disk_bandwidth=4 * BLOCK,
        disk_write_bandwidth=4 * BLOCK,
    )


def simulate_evicted_prefix(make_simulation: Make, cost: CostModel, tiers: SimulatedTiers) -> SimulationReport:
    """Text 1 comes back after text 2 took its blocks; each prompt is 6 blocks and a token, the pool has 8 blocks."""
    requests = [(0, 25, 1, (1,)), (10, 25, 1, (2,)), (20, 25, 1, (1,))]
    simulation = make_simulation(requests, tokens_per_text=24, tiers=tiers, cost=cost)
    while simulation.advance():
        simulation.scheduler.check_integrity()
    found = make_report(simulation)
    assert (found.num_preemptions, found.num_recomputed_tokens) == (0, 0)
    return found


def test_evicted_prefix_is_loaded_from_host_memory(make_simulation: Make, cost: CostModel) -> None:
    """Text 2 finds 2 blocks free and evicts 5 of the 6 of text 1: all but the first, from the last on.

    They are offloaded during the step, except one that the staging buffers have no room for. Loading them (5/8 s, less
    than the 4/5 s it takes to compute them) waits for the four blocks of text 2 that are copied by then.
    """
    found = simulate_evicted_prefix(make_simulation, cost, SimulatedTiers(kv_host_memory=16 * BLOCK))
    tiers = found.tiers
    assert tiers is not None
    assert (tiers.num_host_blocks, tiers.num_disk_blocks) == (16, 0)
    assert tiers.loaded_blocks == 5
    assert tiers.offloaded_blocks >= 5
    assert (tiers.swapped_blocks, tiers.disk_blocks, tiers.loaded_from_disk_blocks) == (0, 0, 0)
    assert (tiers.pool_hit_rate, tiers.host_hit_rate, tiers.disk_hit_rate) == pytest.approx((4 / 75, 20 / 75, 0))
    assert found.prefix_hit_rate == 24 / 75
    assert (tiers.load_s, tiers.save_s) == pytest.approx((9 / 8, 2 / 8))
    assert found.simulated_s == pytest.approx(21 + 1 / 8 + 9 / 8)


def test_loading_from_disk_takes_longer_than_from_host_memory(make_simulation: Make, cost: CostModel) -> None:
    """One of the three host slots is kept free for loads, so the other blocks are offloaded to disk."""
    fast = replace(cost, disk_bandwidth=40 * BLOCK)
    found = simulate_evicted_prefix(make_simulation, fast, SimulatedTiers(kv_host_memory=3 * BLOCK, kv_disk=16 * BLOCK))
    tiers = found.tiers
    assert tiers is not None
    assert tiers.loaded_blocks == 5
    assert tiers.loaded_from_disk_blocks >= 3
    assert tiers.disk_blocks >= tiers.loaded_from_disk_blocks
    assert tiers.disk_read_s == pytest.approx(tiers.loaded_from_disk_blocks / 40)
    assert tiers.host_hit_rate is not None
    assert tiers.disk_hit_rate is not None
    assert tiers.host_hit_rate + tiers.disk_hit_rate == pytest.approx(20 / 75)
    assert tiers.disk_hit_rate == pytest.approx(4 * tiers.loaded_from_disk_blocks / 75)


def test_prefix_that_is_cheaper_to_compute_is_not_loaded(make_simulation: Make, cost: CostModel) -> None:
    """A block of 4 tokens is computed in 4/25 s; the disk takes 2/8 s, and the link 1/8 s after it."""
    found = simulate_evicted_prefix(make_simulation, cost, SimulatedTiers(kv_host_memory=3 * BLOCK, kv_disk=16 * BLOCK))
    assert found.tiers is not None
    assert found.tiers.loaded_from_disk_blocks == 0
    assert found.tiers.disk_read_s == 0


def simulate_memory_pressure(make_simulation: Make, cost: CostModel, tiers: SimulatedTiers) -> SimulationReport:
    """Three requests of 8 to 20 tokens do not fit in 32 slots together."""
    simulation = make_simulation(
        [(0, 8, 12), (0, 8, 12), (0, 8, 12)], tiers=tiers, cost=cost, enable_prefix_caching=False
    )
    while simulation.advance():
        simulation.scheduler.check_integrity()
    assert simulation.tally.num_finished == 3
    assert simulation.pool.num_free == 8
    return make_report(simulation)


def test_swapped_requests_recompute_no_tokens(make_simulation: Make, cost: CostModel) -> None:
    recompute = simulate_memory_pressure(
        make_simulation, cost, SimulatedTiers(kv_host_memory=16 * BLOCK, preemption="recompute")
    )
    assert recompute.num_preemptions > 0
    assert recompute.num_recomputed_tokens >= 8 * recompute.num_preemptions
    assert recompute.tiers is not None
    assert recompute.tiers.swapped_blocks == 0
    swap = simulate_memory_pressure(make_simulation, cost, SimulatedTiers(kv_host_memory=16 * BLOCK, preemption="swap"))
    assert swap.num_preemptions > 0
    assert swap.num_recomputed_tokens == 0
    assert swap.tiers is not None
    assert swap.tiers.swapped_blocks == swap.tiers.loaded_blocks > 0
    assert swap.tiers.load_s > 0
    assert swap.tiers.host_hit_rate == 0  # no prompt asked for what came back
    without = simulate_memory_pressure(make_simulation, cost, SimulatedTiers())
    assert (without.tiers, without.num_recomputed_tokens) == (None, recompute.num_recomputed_tokens)
    assert without.latency_s == recompute.latency_s


@pytest.mark.parametrize(("blocks_per_s", "swaps"), [(1000, True), (1, False)])
def test_automatic_preemption_swaps_only_if_the_link_is_fast(
    make_simulation: Make, cost: CostModel, blocks_per_s: int, swaps: bool
) -> None:
    link = replace(cost, host_bandwidth=blocks_per_s * BLOCK)
    found = simulate_memory_pressure(make_simulation, link, SimulatedTiers(kv_host_memory=16 * BLOCK))
    assert found.num_preemptions > 0
    assert found.tiers is not None
    assert (found.tiers.swapped_blocks > 0) == swaps
    assert (found.num_recomputed_tokens == 0) == swaps


def test_only_the_paged_allocator_has_lower_tiers() -> None:
    workload = generate("alpaca", GeneratorOptions(num_requests=20, rate=20), 256)
    limits = SimulatedLimits(num_blocks=200, max_model_len=256, max_num_seqs=8)
    for allocator in ALLOCATORS:
        tiers = SimulatedTiers(kv_host_memory=1 << 30, preemption="swap")
        simulation = Simulation(SimulationSetup(workload, limits, PRESETS["opt-13b"].cost, allocator, tiers=tiers))
        simulation.run()
        assert (make_report(simulation).tiers is not None) == (allocator == "paged")


def test_equal_setups_with_tiers_give_equal_reports_and_more_reuse_than_without() -> None:
    options = GeneratorOptions(num_requests=80, rate=5, shared_prefix_tokens=400, num_prefixes=12, seed=4)
    workload = generate("alpaca", options, 2048)

    def found(**tiers: Any) -> SimulationReport:
        setup = SimulationSetup(
            workload,
            SimulatedLimits(num_blocks=150),
            PRESETS["llama-3.1-8b"].cost,
            "paged",
            tiers=SimulatedTiers(**tiers),
        )
        simulation = Simulation(setup)
        while simulation.advance():
            if simulation.step_count % 20 == 0:
                simulation.scheduler.check_integrity()
        return make_report(simulation)

    host = {"kv_host_memory": 256 << 20}
    none, first, disk = found(), found(**host), found(**host, kv_disk=1 << 30)
    assert first == found(**host)
    assert none.prefix_hit_rate is not None
    assert first.prefix_hit_rate is not None
    assert disk.prefix_hit_rate is not None
    assert none.prefix_hit_rate < first.prefix_hit_rate
    assert first.ttft_s is not None
    assert none.ttft_s is not None
    assert first.ttft_s.p50 < none.ttft_s.p50
    assert disk.tiers is not None
    parts = (disk.tiers.pool_hit_rate, disk.tiers.host_hit_rate, disk.tiers.disk_hit_rate)
    assert sum(part for part in parts if part is not None) == pytest.approx(disk.prefix_hit_rate)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"kv_disk": 1 << 30}, "kv_disk=1073741824 is not accepted without host memory"),
        ({"preemption": "swap"}, "preemption='swap' is not accepted without host memory"),
        ({"preemption": "drop"}, "preemption='drop' is not accepted: must be one of auto, recompute, swap"),
        ({"kv_host_memory": -1}, "kv_host_memory=-1 is not accepted"),
        ({"kv_host_memory": 1 << 60}, "kv_host_memory=1152921504606846976 is not accepted"),
    ],
)
def test_invalid_tiers_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        SimulatedTiers(**sizes)


def test_tier_smaller_than_a_block_is_refused() -> None:
    assert SimulatedTiers(kv_host_memory=100, kv_disk=250).num_tier_blocks(100) == (1, 2)
    assert SimulatedTiers().num_tier_blocks(0) == (0, 0)
    with pytest.raises(BadInput, match="kv_host_memory=99 is not accepted: one block takes 100 bytes"):
        SimulatedTiers(kv_host_memory=99).num_tier_blocks(100)
    with pytest.raises(BadInput, match="kv_disk=99 is not accepted"):
        SimulatedTiers(kv_host_memory=100, kv_disk=99).num_tier_blocks(100)
    with pytest.raises(BadInput, match="at most 16777216 blocks"):
        SimulatedTiers(kv_host_memory=1 << 50).num_tier_blocks(1)
    with pytest.raises(BadInput, match="kv_bytes_per_token=0"):
        SimulatedTiers(kv_host_memory=100).num_tier_blocks(0)

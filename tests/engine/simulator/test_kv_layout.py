"""KV groups and states in the simulator: which blocks windows free, what it costs if they do not, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_engine.simulator.kv_layout import KVLayout, SimulatedGroup, recorded_layout
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import make_report
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED

Make = Callable[..., Simulation]
WINDOW = GroupRule(8)
LAYOUT = KVLayout(
    (SimulatedGroup("full", GroupRule(), 2, 10.0), *[SimulatedGroup("window", WINDOW, 2, 10.0) for _ in range(2)])
)
LATENTS = KVLayout((SimulatedGroup("latent", GroupRule(), 4, 10.0, expanded_bytes=80.0),))


def setup(layout: KVLayout, scenario: str = "", allocator: str = "paged", **limits: Any) -> SimulationSetup:
    cost = CostModel(
        weight_bytes=0,
        kv_bytes_per_token=0,
        flops_per_token=0,
        attention_flops_per_pair=0,
        memory_bandwidth=1,
        flops_per_second=1,
        step_overhead_s=1,
    )
    workload = Workload("by hand", tuple(WorkloadRequest(0, 20, 8) for _ in range(6)))
    sizes = {"num_blocks": 1, "block_size": 4, "max_model_len": 32} | limits
    return SimulationSetup(workload, SimulatedLimits(**sizes), cost, allocator, layout=layout, scenario=scenario)


def test_simulated_groups_hold_the_blocks_calculated_by_hand(make_simulation: Make) -> None:
    """Of 28 tokens 27 are computed: 7 blocks of full attention. After 20 tokens the next one reads from token 13 on,
    which is in the fourth block; a window of 8 tokens is in 3 blocks at most, and in the whole prompt while it is
    computed.
    """
    simulation = make_simulation([(0, 20, 8)], layout=LAYOUT, num_blocks=32)
    simulation.run()
    found = make_report(simulation)
    full, window, other = found.groups
    assert (full.kind, full.most_blocks, full.token_bytes) == ("full", 7, 10.0)
    assert (window.kind, window.window, window.most_blocks) == ("window", 8, 3)
    assert other == window
    assert full.mean_blocks == pytest.approx((5 + 6 * 4 + 7 * 3) / 8)
    assert found.block_bytes == 40
    simulation.scheduler.check_integrity()


def test_without_freeing_fewer_requests_run_and_more_are_preempted() -> None:
    """The same bytes hold 36 blocks of a group, or 12 blocks of all layers."""
    reports = {}
    for scenario in ("", NOT_FREED):
        sized = setup(LAYOUT, scenario).sized(36 * 40)
        simulation = Simulation(sized)
        assert simulation.pool.num_blocks == (12 if scenario else 36)
        assert sized.block_bytes == (120 if scenario else 40)
        while simulation.advance():
            simulation.scheduler.check_integrity()
        reports[scenario] = make_report(simulation)
        assert reports[scenario].num_finished == 6
    now, kept = reports[""], reports[NOT_FREED]
    assert (len(now.groups), len(kept.groups)) == (3, 1)
    assert (now.mean_batch or 0) > (kept.mean_batch or 0)
    assert now.num_preemptions < kept.num_preemptions
    assert kept.simulated_s > now.simulated_s


def test_expanded_mla_has_proportionally_fewer_blocks() -> None:
    assert setup(LATENTS).sized(4000).limits.num_blocks == 100
    wide = setup(LATENTS, EXPANDED).sized(4000)
    assert (wide.limits.num_blocks, wide.block_bytes, wide.label) == (12, 320, "paged, with MLA expanded")
    assert LAYOUT.why_not_expanded == "no layer holds latents"
    assert "does not contain" in KVLayout((replace(LATENTS.groups[0], expanded_bytes=0.0),)).why_not_expanded


def test_reserving_allocators_have_one_group() -> None:
    contiguous = setup(LAYOUT, allocator="contiguous").sized(32 * 120)
    assert (contiguous.limits.num_blocks, contiguous.block_bytes) == (32, 120)
    simulation = Simulation(contiguous)
    simulation.run()
    assert [group.kind for group in make_report(simulation).groups] == ["full"]
    with pytest.raises(BadInput, match="num_gpu_blocks_override=0"):
        setup(LAYOUT).sized(39)


def test_attention_reads_only_as_far_back_as_each_window() -> None:
    """For 20 tokens and one more, 21 of full attention and 8 of each window are read, with as many pairs."""
    costs = {"kv_bytes_per_token": 1e9, "attention_flops_per_pair": 12.0, "step_overhead_s": 0.0}
    one = replace(setup(LAYOUT, num_blocks=64), workload=Workload("one", (WorkloadRequest(0, 20, 2),)))
    slow = replace(one, cost=replace(one.cost, **costs, memory_bandwidth=1, flops_per_second=1e9))
    simulation = Simulation(slow)
    simulation.advance()
    assert simulation.now_ns == 10 * 3 * 20 * 10**9
    before = simulation.now_ns
    simulation.advance()
    assert simulation.now_ns - before == 10 * (21 + 8 + 8) * 10**9
    simulation = Simulation(replace(slow, cost=replace(slow.cost, memory_bandwidth=1e12, flops_per_second=1)))
    simulation.advance()
    of_windows = 8 * 9 // 2 + 12 * 8
    assert simulation.now_ns == pytest.approx(12 * (20 * 21 / 2 + 2 * of_windows) / 3 * 1e9)


def test_chunked_attention_reads_from_the_first_token_of_the_chunk() -> None:
    layout = KVLayout((SimulatedGroup("chunked", GroupRule(8, is_chunked=True), 2, 10.0),))
    one = setup(layout, num_blocks=64, enable_prefix_caching=False)
    one = replace(one, workload=Workload("one", (WorkloadRequest(0, 20, 2),)))
    cost = replace(one.cost, attention_flops_per_pair=1.0, step_overhead_s=0.0, memory_bandwidth=1e12)
    simulation = Simulation(replace(one, cost=cost))
    simulation.advance()
    assert simulation.now_ns == (2 * 36 + 10) * 10**9


def test_prefix_hits_reach_as_far_as_all_groups_have_blocks(make_simulation: Make) -> None:
    """A text of 16 tokens comes again, after which windows still have their last blocks; without a cache there is no
    hit.
    """
    requests = [(0, 20, 1, (7,)), (5, 20, 1, (7,))]
    for caching, rate in ((True, 16 / 40), (False, 0)):
        simulation = make_simulation(
            requests, tokens_per_text=16, layout=LAYOUT, num_blocks=64, enable_prefix_caching=caching
        )
        simulation.run()
        assert make_report(simulation).prefix_hit_rate == rate


def test_saved_recurrent_states_of_a_repeated_text_are_reused_in_a_simulation(make_simulation: Make) -> None:
    """A state of each text is saved after its last full block; with one slot for it, the second text takes
    that slot.
    """
    layout = replace(LAYOUT, groups=LAYOUT.groups[:1], state_bytes=100)
    requests = [(0, 17, 1, (7,)), (999, 17, 1, (8,)), (2999, 17, 1, (7,)), (3999, 17, 1, (8,))]
    hits = []
    for num_states in (2, 8):
        simulation = make_simulation(
            requests, tokens_per_text=16, layout=layout, num_blocks=64, num_states=num_states, state_interval=64
        )
        simulation.run()
        found = make_report(simulation)
        assert found.num_states == num_states
        hits.append(found.prefix_hit_rate)
        simulation.scheduler.check_integrity()
    assert hits == [0, 32 / 68]
    assert found.num_states_restored == 2


def test_simulated_recurrent_states_take_at_most_half_of_the_memory() -> None:
    layout = replace(LAYOUT, state_bytes=100)
    sized = setup(layout, max_num_seqs=4).sized(1200, state_checkpoints=2)
    assert (sized.num_states, sized.limits.num_blocks) == (6, 15)
    counted = setup(layout, max_num_seqs=4).sized(1200, state_checkpoints=2, for_blocks=True)
    assert (counted.num_states, counted.limits.num_blocks) == (7, 30)


def test_kv_groups_and_state_size_are_read_from_a_recording() -> None:
    groups = (
        KVGroup(kind="full", num_layers=2, block_bytes=64),
        KVGroup(kind="window", num_layers=2, block_bytes=64, window=8),
        KVGroup(kind="state", num_layers=3, block_bytes=100),
    )
    found = recorded_layout(CacheInfo(num_blocks=9, block_size=4, groups=groups))
    assert found is not None
    assert [(group.kind, group.rule, group.token_bytes) for group in found.groups] == [
        ("full", GroupRule(), 16.0),
        ("window", GroupRule(8), 16.0),
    ]
    assert found.state_bytes == 100
    assert recorded_layout(CacheInfo(num_blocks=9, block_size=4)) is None
    assert recorded_layout(CacheInfo(num_blocks=9, block_size=4, groups=(KVGroup(kind="full"),))) is None


def test_separate_pools_are_split_into_groups_of_equal_size() -> None:
    groups = (
        KVGroup(kind="full", num_layers=4, block_bytes=64, num_blocks=10),
        KVGroup(kind="window", num_layers=6, block_bytes=96, window=8, num_blocks=5),
    )
    found = recorded_layout(CacheInfo(num_blocks=15, block_size=4, groups=groups))
    assert found is not None
    assert [(group.kind, group.num_layers, group.token_bytes) for group in found.groups] == [
        *[("full", 2, 8.0)] * 2,
        *[("window", 2, 8.0)] * 3,
    ]

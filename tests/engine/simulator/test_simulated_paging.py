"""The policy `virtual` in the simulator: its pages, its waste and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kvscope_engine.policy.allocation.mapped_pool import page_slots_of
from kvscope_engine.simulator.costs.cost_model import PRESETS, CostModel
from kvscope_engine.simulator.simulated_paging import SimulatedPaging
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import SimulationReport, make_report
from kvscope_engine.simulator.workloads.generators import GeneratorOptions, generate
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

MIB = 1 << 20


def simulate(
    one_second_step: CostModel, requests: list[tuple[int, int, int]], page_tokens: int, **limits: Any
) -> Simulation:
    """Run two layers with pages of 4 KiB for this many tokens."""
    made = tuple(WorkloadRequest(*request) for request in requests)
    cost = dataclasses.replace(one_second_step, kv_bytes_per_token=2 * 4096 / page_tokens, memory_bandwidth=1e18)
    sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 32} | limits
    return Simulation(
        SimulationSetup(Workload("by hand", made), SimulatedLimits(**sizes), cost, "virtual", SimulatedPaging(2, 4096))
    )


def test_simulated_waste_of_the_virtual_allocator_equals_the_hand_calculation(one_second_step: CostModel) -> None:
    """One request at a time has two of 4 pages of 16 tokens, with 17 and 18 tokens, while the second waits."""
    simulation = simulate(one_second_step, [(0, 17, 2), (0, 3, 1)], 16, num_blocks=16, max_num_seqs=1)
    simulation.run()
    memory = make_report(simulation).memory
    assert memory is not None
    shares = (memory.states, memory.reserved, memory.internal, memory.external_and_others, memory.cached)
    assert [64 * share for share in shares] == pytest.approx([17.5, 0, 14.5, 32, 0])
    assert memory.external_fragmentation == 0.0
    assert make_report(simulation).tokens_per_page_group == 16.0


def test_integrity_of_a_simulated_virtual_allocator_holds_after_each_step(one_second_step: CostModel) -> None:
    requests = [(number * 10**9 // 3, 1 + 7 * number % 13, 1 + 5 * number % 17) for number in range(40)]
    simulation = simulate(one_second_step, requests, 12, num_blocks=16, max_num_batched_tokens=16)
    while simulation.advance():
        simulation.scheduler.check_integrity()
    assert simulation.tally.num_finished == 40
    assert simulation.scheduler.totals.preemptions > 0
    pages = page_slots_of(simulation.pool)
    assert pages is not None
    assert (pages.num_used, pages.num_needed, simulation.pool.num_active) == (0, 0, 0)


def run_llama(allocator: str, page_bytes: int) -> SimulationReport:
    """Run prompts and answers of a few hundred tokens in 2 GiB of Llama 3.1 8B's cache."""
    preset = PRESETS["llama-3.1-8b"]
    limits = SimulatedLimits(num_blocks=1024, enable_prefix_caching=False, max_model_len=8192)
    workload = generate("sharegpt", GeneratorOptions(num_requests=80, rate=math.inf), 8192)
    paging = SimulatedPaging(preset.num_layers, page_bytes)
    simulation = Simulation(SimulationSetup(workload, limits, preset.cost, allocator, paging))
    simulation.run()
    return make_report(simulation)


def test_pages_of_2_mib_waste_much_and_pages_of_64_kib_little() -> None:
    """A page of each layer holds 512 or 16 tokens: half a page of each request is empty on average."""
    large, small, paged = run_llama("virtual", 2 * MIB), run_llama("virtual", 64 << 10), run_llama("paged", 0x1000)
    assert (large.tokens_per_page_group, small.tokens_per_page_group) == (512.0, 16.0)
    assert large.memory is not None
    assert small.memory is not None
    assert paged.memory is not None
    assert large.memory.internal > 0.2
    assert small.memory.internal < 0.03
    assert small.memory.internal == pytest.approx(paged.memory.internal, abs=0.005)
    assert large.memory.states < small.memory.states - 0.2
    assert paged.tokens_per_page_group is None


@pytest.mark.parametrize(
    ("paging", "said"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_layers": 1 << 20}, "num_layers=1048576"),
        ({"page_bytes": 3000}, "page_size=3000"),
        ({"page_bytes": 6 << 12}, "page_size=24576 is not accepted: must be a power of two from 4096 to 1073741824"),
    ],
)
def test_invalid_paging_is_refused(paging: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        SimulatedPaging(**paging)


def test_pool_smaller_than_a_page_is_refused(one_second_step: CostModel) -> None:
    with pytest.raises(BadInput, match=r"a pool of 3 blocks \(0.01 MiB\) is too small for allocator='virtual'"):
        simulate(one_second_step, [(0, 1, 1)], 16, num_blocks=3)

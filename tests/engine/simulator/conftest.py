"""Fixtures of simulator tests: tiny simulations whose numbers can be calculated by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_engine.simulator.kv_layout import KVLayout
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest

SECOND_NS = 1_000_000_000


@pytest.fixture
def one_second_step() -> CostModel:
    """A cost model whose only cost is the step overhead of one second."""
    return CostModel(
        weight_bytes=0,
        kv_bytes_per_token=0,
        flops_per_token=0,
        attention_flops_per_pair=0,
        memory_bandwidth=1,
        flops_per_second=1,
        step_overhead_s=1,
    )


@pytest.fixture
def make_simulation(one_second_step: CostModel) -> Callable[..., Simulation]:
    """Function that makes a simulation: `make_simulation([(arrival_s, prompt, output[, texts]), ...], **limits)`."""

    def make(
        requests: list[tuple[float, int, int] | tuple[float, int, int, tuple[int, ...]]],
        allocator: str = "paged",
        tokens_per_text: int = 1,
        tiers: SimulatedTiers | None = None,
        cost: CostModel = one_second_step,
        layout: KVLayout | None = None,
        scenario: str = "",
        num_states: int = 0,
        state_interval: int = 512,
        **limits: int,
    ) -> Simulation:
        made = tuple(WorkloadRequest(round(first * SECOND_NS), *rest) for first, *rest in requests)  # type: ignore[arg-type]
        sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 32} | limits
        workload = Workload("by hand", made, tokens_per_text)
        setup = SimulationSetup(
            workload, SimulatedLimits(**sizes), cost, allocator, tiers=tiers or SimulatedTiers(), layout=layout
        )
        return Simulation(replace(setup, scenario=scenario, num_states=num_states, state_interval=state_interval))

    return make

"""Steps in which requests only decode are simulated together. The result equals that of steps planned one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.workloads.generators import GeneratorOptions, generate
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest


class EachStep:
    """Observer, with which a simulation plans each step."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def step(self, plan: StepPlan, result: StepResult, waited_ns: int) -> None:
        self._simulation.scheduler.changes.drain()

    def end(self) -> None: ...


def shared_prompts(*, has_clients: bool) -> Workload:
    options = GeneratorOptions(
        num_requests=40, rate=6, arrivals="poisson", shared_prefix_tokens=48, num_prefixes=3, seed=3
    )
    workload = generate("sharegpt", options, max_model_len=1024)
    requests = tuple(
        replace(
            request, client=str(number % 3) if has_clients else "", num_output_tokens=min(request.num_output_tokens, 90)
        )
        for number, request in enumerate(workload.requests)
    )
    return replace(workload, requests=requests)


def run_counted(simulation: Simulation) -> int:
    num_advances = 0
    while simulation.advance():
        num_advances += 1
    return num_advances


def run_both_ways(workload: Workload, limits: SimulatedLimits) -> Simulation:
    """Assert that steps simulated together have the result of single steps, and return the simulation of those."""
    setup = SimulationSetup(workload, limits, PRESETS["opt-13b"].cost, "paged", variation=(0.9, 1.0, 1.2))
    stepwise, together = Simulation(setup), Simulation(setup, samples_memory=False)
    stepwise.observe(EachStep(stepwise))
    num_advances = run_counted(stepwise)
    assert run_counted(together) < 0.6 * num_advances
    assert (together.step_count, together.now_ns) == (stepwise.step_count, stepwise.now_ns)
    assert together.scheduler.totals == stepwise.scheduler.totals
    for name in ("numbers", "ttft_ns", "total_ns", "decode_ns", "num_scheduled", "num_scheduled_under_load"):
        assert repr(getattr(together.tally, name)) == repr(getattr(stepwise.tally, name)), name
    assert together.pool.ledger.differences(stepwise.pool.ledger) == []
    together.scheduler.check_integrity()
    return stepwise


@pytest.mark.parametrize("max_num_batched_tokens", [64, 512])
@pytest.mark.parametrize("has_clients", [False, True])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(70, 256), (160, 4), (4000, 256)])
def test_steps_simulated_together_equal_steps_planned_one_by_one(
    num_blocks: int, max_num_seqs: int, has_clients: bool, max_num_batched_tokens: int
) -> None:
    limits = SimulatedLimits(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_model_len=1024,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    stepwise = run_both_ways(shared_prompts(has_clients=has_clients), limits)
    if num_blocks == 70:
        assert stepwise.scheduler.totals.preemptions


def test_request_that_waited_because_a_chunk_used_the_whole_budget_is_admitted_in_the_next_step() -> None:
    requests = (WorkloadRequest(0, 1024, 300), WorkloadRequest(1, 100, 50))
    run_both_ways(Workload("budget", requests, 1), SimulatedLimits(num_blocks=1000, max_num_batched_tokens=512))


def test_request_that_shares_the_blocks_completed_by_the_last_chunk_is_admitted_in_the_next_step() -> None:
    requests = (
        WorkloadRequest(0, 1000, 300, text_ids=tuple(range(1000))),
        WorkloadRequest(1, 1000, 50, text_ids=tuple(range(990))),
    )
    run_both_ways(Workload("prefix", requests, 1), SimulatedLimits(num_blocks=90, max_num_batched_tokens=512))

"""The clock, arrivals, ends, prefix sharing and preemption of a simulation, with numbers calculated by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvscope_engine.policy.allocation.allocation_policy import PagedAllocation
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import Percentiles, make_report
from kvscope_engine.simulator.workloads.generators import GeneratorOptions, generate
from kvscope_telemetry.errors import BadInput, KvscopeError

Make = Callable[..., Simulation]
ALLOCATORS = ("paged", "contiguous", "buddy", "oracle")


def seconds(values_ns: Any) -> list[float]:
    return [value / 1e9 for value in values_ns]


def test_two_requests_have_the_times_calculated_by_hand(make_simulation: Make) -> None:
    """The first prefills from 0 to 1 s and ends at 2 s; the second arrives at 1.5 s and runs from 2 s to 5 s."""
    simulation = make_simulation([(0, 3, 2), (1.5, 4, 3)])
    simulation.run()
    tally = simulation.tally
    assert seconds(tally.ttft_ns) == [1.0, 1.5]
    assert seconds(tally.total_ns) == [2.0, 3.5]
    assert seconds(tally.per_token_ns) == pytest.approx([1.0, 3.5 / 3])
    found = make_report(simulation)
    assert (found.num_steps, found.simulated_s, found.num_finished) == (5, 5.0, 2)
    assert (found.mean_batch, found.requests_per_s, found.output_tokens_per_s) == (1.0, 0.4, 1.0)
    assert found.latency_s == Percentiles(p50=2.75, p90=pytest.approx(3.35), p99=pytest.approx(3.485))
    assert (found.memory, found.mean_batch_under_load, found.num_steps_under_load) == (None, None, 0)


def test_clock_jumps_over_idle_time(make_simulation: Make) -> None:
    simulation = make_simulation([(0, 3, 1), (1000, 3, 1)])
    simulation.run()
    assert (simulation.step_count, simulation.now_ns) == (2, 1001 * 10**9)
    assert seconds(simulation.tally.total_ns) == [1.0, 1.0]


def test_requests_that_arrive_together_share_a_step(make_simulation: Make) -> None:
    simulation = make_simulation([(0, 3, 2), (0, 3, 2)])
    simulation.run()
    assert simulation.step_count == 2
    assert make_report(simulation).mean_batch == 2.0


def test_long_prompt_takes_as_many_steps_as_it_has_chunks(make_simulation: Make) -> None:
    simulation = make_simulation([(0, 10, 1)], max_num_batched_tokens=4)
    simulation.run()
    assert seconds(simulation.tally.ttft_ns) == [3.0]


def test_equal_texts_hit_the_prefix_cache_for_every_block_size(make_simulation: Make) -> None:
    """A text of 8 tokens fills two blocks of 4 or two of 3: 8 or 6 tokens of the second prompt are hits."""
    requests = [(0, 10, 1, (7,)), (5, 10, 1, (7,)), (10, 10, 1, (8,))]
    for block_size, cached in ((4, 8), (3, 6)):
        simulation = make_simulation(requests, tokens_per_text=8, block_size=block_size)
        simulation.run()
        assert make_report(simulation).prefix_hit_rate == cached / 30
    simulation = make_simulation(requests, tokens_per_text=8, enable_prefix_caching=False)
    simulation.run()
    assert make_report(simulation).prefix_hit_rate == 0.0


def test_equal_prompts_continue_with_different_tokens(make_simulation: Make) -> None:
    simulation = make_simulation([(0, 4, 9, (7,)), (0, 4, 9, (7,))], tokens_per_text=8)
    while simulation.advance() and simulation.step_count < 9:
        tokens = [request.output_token_ids for request in simulation.scheduler.requests.values()]
        assert not set(tokens[0]) & set(tokens[1])


def test_impossible_requests_are_refused_and_the_rest_finishes(make_simulation: Make) -> None:
    simulation = make_simulation([(0, 40, 1), (0, 3, 1), (0, 30, 3)])
    simulation.run()
    found = make_report(simulation)
    assert (found.num_finished, found.num_refused) == (1, 2)
    assert "make 41 tokens: at most 32 are accepted" in found.first_refusal


def test_preempted_requests_finish(make_simulation: Make) -> None:
    """Three requests of 8 to 20 tokens do not fit in 32 slots together."""
    simulation = make_simulation([(0, 8, 12)] * 3, enable_prefix_caching=False)
    simulation.run()
    found = make_report(simulation)
    assert found.num_finished == 3
    assert found.num_preemptions >= found.num_preempted_requests > 0
    assert simulation.pool.num_free == 8


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_integrity_of_pool_and_scheduler_holds_after_each_simulated_step(make_simulation: Make, allocator: str) -> None:
    requests = [(number / 3, 1 + 7 * number % 13, 1 + 5 * number % 17) for number in range(40)]
    simulation = make_simulation(requests, allocator, num_blocks=16, max_num_batched_tokens=16)
    while simulation.advance():
        simulation.scheduler.check_integrity()
    assert simulation.tally.num_finished == 40
    assert simulation.pool.num_available == 16


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_limiting_the_queue_length_does_not_change_the_simulation_report(make_simulation: Make, allocator: str) -> None:
    requests = [(number / 5, 1 + 7 * number % 13, 1 + 5 * number % 17) for number in range(60)]
    bounded, whole = (make_simulation(requests, allocator, max_num_seqs=3) for _ in range(2))
    whole._max_queued = 1000
    longest = 0
    while whole.advance():
        longest = max(longest, whole.scheduler.num_waiting)
    bounded.run()
    assert longest > bounded._max_queued
    assert make_report(bounded) == make_report(whole)


def test_simulations_with_equal_setup_and_seed_give_equal_reports() -> None:
    def found(seed: int) -> Any:
        options = GeneratorOptions(num_requests=60, rate=5, arrivals="bursty", shared_prefix_tokens=20, seed=seed)
        limits = SimulatedLimits(num_blocks=200)
        simulation = Simulation(
            SimulationSetup(generate("mixed", options, 2048), limits, PRESETS["opt-13b"].cost, "paged")
        )
        simulation.run()
        return make_report(simulation)

    assert found(1) == found(1)
    assert found(1) != found(2)


@pytest.mark.parametrize(
    ("allocator", "percent"), [("contiguous", 20.4), ("buddy", 26.8), ("oracle", 38.2), ("paged", 96.3)]
)
def test_effective_memory_is_near_figure_2_of_the_paged_attention_paper(allocator: str, percent: float) -> None:
    """A short run with the setup of the paper: 15.7K slots, block size 16, at most 2048 tokens, 2 requests/s."""
    options = GeneratorOptions(num_requests=150, rate=math.inf)
    limits = SimulatedLimits(num_blocks=981, enable_prefix_caching=False)
    workload = generate("sharegpt", options, limits.max_model_len)
    simulation = Simulation(SimulationSetup(workload, limits, PRESETS["opt-13b"].cost, allocator))
    simulation.run()
    memory = make_report(simulation).memory
    assert memory is not None
    assert 100 * memory.states == pytest.approx(percent, abs=6)


def test_paged_batches_as_many_more_requests_as_in_figure_13_of_the_paged_attention_paper() -> None:
    """All requests come at once, so that memory is the only limit: the paper has 30.42 over 7.00."""

    def batch(allocator: str) -> float:
        limits = SimulatedLimits(num_blocks=981, enable_prefix_caching=False)
        workload = generate("sharegpt", GeneratorOptions(num_requests=150), limits.max_model_len)
        simulation = Simulation(SimulationSetup(workload, limits, PRESETS["opt-13b"].cost, allocator))
        simulation.run()
        found = make_report(simulation).mean_batch_under_load
        assert found is not None
        return found

    assert batch("paged") / batch("contiguous") >= 3.5


def test_unknown_allocator_is_refused_by_name(make_simulation: Make) -> None:
    with pytest.raises(BadInput, match="'slab'"):
        make_simulation([(0, 1, 1)], "slab")


def test_policy_that_never_allocates_is_an_error_instead_of_an_endless_run(
    make_simulation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedAllocation, "num_available", lambda self, request: 0)
    with pytest.raises(KvscopeError, match=r"'paged' can never place request 1 .* in a pool of 8 blocks of 4"):
        make_simulation([(0, 3, 1)]).run()


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks", 0), ("num_blocks", 1 << 40), ("block_size", 0), ("max_num_seqs", -1), ("max_model_len", 0)],
)
def test_simulation_with_invalid_block_or_request_limits_is_refused(name: str, value: int) -> None:
    with pytest.raises(BadInput, match=f"={value} is not accepted"):
        SimulatedLimits(**({"num_blocks": 1} | {name: value}))

"""The time of a step equals the formula, calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_engine.simulator.costs.cost_model import PRESETS, CostModel
from kvscope_telemetry.errors import BadInput

COST = CostModel(
    weight_bytes=1000,
    kv_bytes_per_token=10,
    flops_per_token=200,
    attention_flops_per_pair=3,
    memory_bandwidth=1e6,
    flops_per_second=1e9,
    step_overhead_s=0.5,
)


def plan(*chunks: tuple[int, int]) -> StepPlan:
    """Return a plan with chunks of (start, tokens); their requests do not matter."""
    nobody: Any = None
    return StepPlan(tuple(Scheduled(nobody, start, count, True) for start, count in chunks), len(chunks))


def test_memory_bound_step_takes_the_time_of_its_bytes() -> None:
    """The step reads 1000 + 10 x (8 + 5) bytes at 1e6 bytes/s and has an overhead of half a second."""
    assert COST.step_ns(plan((7, 1), (0, 5))) == round((1130 / 1e6 + 0.5) * 1e9)


def test_compute_bound_step_takes_the_time_of_its_arithmetic() -> None:
    """The step computes 200 x 6 + 3 x (8 + 1 + 2 + 3 + 4 + 5) FLOP at 10 FLOP/s: a token attends to itself and all
    before it.
    """
    slow = replace(COST, flops_per_second=10)
    assert slow.step_ns(plan((7, 1), (0, 5))) == round((1269 / 10 + 0.5) * 1e9)


def test_step_cost_of_a_later_prompt_chunk_includes_attention_to_all_earlier_tokens() -> None:
    """Tokens 4 and 5 attend to 5 and 6 tokens."""
    only = replace(COST, flops_per_token=0, attention_flops_per_pair=1, flops_per_second=1, step_overhead_s=0)
    assert only.step_ns(plan((4, 2))) == 11 * 10**9


def test_step_without_costs_still_takes_some_time() -> None:
    assert replace(COST, weight_bytes=0, kv_bytes_per_token=0, flops_per_token=0, step_overhead_s=0).step_ns(
        plan((0, 1))
    )


def test_preset_of_opt_13b_matches_the_paper() -> None:
    preset = PRESETS["opt-13b"]
    assert preset.cost.kv_bytes_per_token == 819_200  # PagedAttention, section 3: 800 KB a token
    assert preset.cost.weight_bytes == pytest.approx(26e9, rel=0.02)
    assert preset.num_slots // 16 == 981


def test_every_gpu_preset_has_its_own_host_bandwidth() -> None:
    bandwidths = {name: preset.cost.host_bandwidth for name, preset in PRESETS.items()}
    assert bandwidths == {"opt-13b": 25e9, "opt-66b": 100e9, "opt-175b": 200e9, "llama-3.1-8b": 55e9}


@pytest.mark.parametrize("name", ["host_bandwidth", "disk_bandwidth", "disk_write_bandwidth"])
def test_bandwidth_of_zero_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name}=0 is not accepted"):
        replace(COST, **{name: 0.0})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", ["weight_bytes", "memory_bandwidth", "step_overhead_s", "host_bandwidth"])
def test_cost_model_with_negative_or_infinite_rates_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=name):
        replace(COST, **{name: value})

"""Steps of models with MLA latents on an emulated GPU: launched kernels, and nothing compiled in service."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.rehearsal.steps.plans import scheduled

from kvscope_engine.policy.step_plan import StepPlan

DEEPSEEK: dict[str, Any] = {
    "architecture": "youtu",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
"""Sizes of one layer except for the number of heads."""


STEPS = {
    "decodes": StepPlan((scheduled(1, 50, 1), scheduled(2, 400, 1)), 2),
    "a short run behind a context": StepPlan((scheduled(1, 50, 1), scheduled(2, 400, 30)), 1),
    "a prompt": StepPlan((scheduled(1, 0, 500),), 0),
    "all of them": StepPlan((scheduled(1, 50, 1), scheduled(2, 90, 5), scheduled(3, 0, 400), scheduled(4, 70, 9)), 1),
}
LAUNCHES = {
    "decodes": set[str](),  # it is in their graph
    "a short run behind a context": {"paged_latent_attention"},
    "a prompt": {"paged_prefill_attention"},
    "all of them": {"paged_latent_attention", "paged_prefill_attention"},
}


@pytest.mark.parametrize(
    ("piecewise_graphs", "kv_dtype"),
    [(True, torch.bfloat16), pytest.param(False, torch.int8, marks=pytest.mark.storm)],
    ids=str,
)
def test_mla_step_launches_the_expected_attention_kernels(
    fake_gpu: Any, *, piecewise_graphs: bool, kv_dtype: torch.dtype
) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=piecewise_graphs, kv_dtype=kv_dtype, **DEEPSEEK)
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    for name, plan in STEPS.items():
        fake_gpu.seen.clear()
        runner.run(plan)
        launched = {kernel for kernel in fake_gpu.seen.launches if kernel.startswith("paged")}
        assert launched == LAUNCHES[name], name
        assert fake_gpu.seen.read_backs == 1, "only the tokens are read back"
        assert bool(fake_gpu.seen.replays) == (piecewise_graphs or name == "decodes"), name
    assert fake_gpu.seen.compiled == known


def test_mla_drafts_are_verified_in_a_graph(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(max_drafts=3, **DEEPSEEK)
    runner.warm_up(lambda _: None)
    assert runner.notes == []
    known = set(fake_gpu.seen.compiled)
    fake_gpu.seen.clear()
    drafted = scheduled(2, 400, 1)._replace(num_tokens=3, drafts=(5, 6))
    runner.run(StepPlan((scheduled(1, 50, 1), drafted), 1))
    assert (fake_gpu.seen.replays, dict(fake_gpu.seen.launches)) == (1, {})
    assert fake_gpu.seen.compiled == known


@pytest.mark.parametrize(
    "kv_dtype", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.storm)], ids=str
)
def test_mla_decodes_run_without_graphs(fake_gpu: Any, kv_dtype: torch.dtype) -> None:
    runner = fake_gpu.make_runner(enforce_eager=True, page_heat=1, kv_dtype=kv_dtype, **DEEPSEEK)
    runner.warm_up(lambda _: None)
    fake_gpu.seen.clear()
    runner.run(STEPS["decodes"])
    launched = fake_gpu.seen.launches
    assert launched["paged_latent_attention"] == launched["merge_splits"] == 2
    assert "paged_decode_attention" not in launched

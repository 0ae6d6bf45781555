"""Steps of mixture-of-experts models on an emulated GPU: graphs, nothing read on the host, nothing compiled in
service.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.rehearsal.steps.plans import decodes, scheduled

from kvscope_engine.policy.step_plan import StepPlan

QWEN3: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
}
MODELS = {
    "qwen3": QWEN3,
    "mixtral": {"architecture": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss": {"architecture": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm": {
        "architecture": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 0,
    },
}
EXPERTS = ("align_experts", "expert_product", "sum_experts")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_moe_decodes_are_graph_replays(fake_gpu: Any, model: dict[str, Any]) -> None:
    runner = fake_gpu.make_runner(**model)
    runner.warm_up(lambda _: None)
    assert runner.notes == []
    for count in (1, 3):
        fake_gpu.seen.clear()
        runner.run(decodes(count))
        assert fake_gpu.seen.replays == 1
        assert fake_gpu.seen.read_backs == 1, "only the tokens are read back"
        assert not any(fake_gpu.seen.launches[kernel] for kernel in EXPERTS)


def test_moe_step_launches_the_expected_number_of_expert_kernels(fake_gpu: Any) -> None:
    """A layer has two products and their sum; the experts of a single token are not sorted."""
    runner = fake_gpu.make_runner(enforce_eager=True, **QWEN3)
    runner.warm_up(lambda _: None)
    for plan, num_aligned in ((decodes(1), 0), (decodes(2), 2), (StepPlan((scheduled(1, 0, 300),), 0), 2)):
        fake_gpu.seen.clear()
        runner.run(plan)
        assert [fake_gpu.seen.launches[kernel] for kernel in EXPERTS] == [num_aligned, 4, 2]
        assert (fake_gpu.seen.read_backs, fake_gpu.seen.waits) == (1, 1)


def test_moe_steps_compile_nothing_in_service(fake_gpu: Any) -> None:
    """Tiles grow with the tokens of a step; the warm-up covers all sizes."""
    runner = fake_gpu.make_runner(enforce_eager=True, max_num_seqs=64, **QWEN3)
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    for num_tokens in (2, 3, 5, 30, 63, 65, 100, 129, 200, 257, 300, 500, 511, 512):
        runner.run(StepPlan((scheduled(1, 0, num_tokens),), 0))
    for count in (1, 2, 7, 33, 60):
        runner.run(decodes(count))
    new = {key.split()[0] for key in fake_gpu.seen.compiled - known}
    assert new.isdisjoint({f"_{kernel}_kernel" for kernel in EXPERTS})


@pytest.mark.parametrize(("capability", "has_graphs"), [((8, 9), False), ((9, 0), True)], ids=str)
def test_graphs_are_left_out_if_torch_reads_the_experts_on_the_host(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_graphs: bool
) -> None:
    """This is reported at the start, without a failing capture."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    runner = fake_gpu.make_runner(fuses_experts=False, **QWEN3)
    runner.warm_up(lambda _: None)
    for _ in range(2):
        fake_gpu.seen.clear()
        runner.run(decodes(2))
    assert fake_gpu.seen.replays == has_graphs
    assert runner.notes == (
        []
        if has_graphs
        else [
            "CUDA graphs could not be captured, steps run without them (slower): Qwen3MoeExperts"
            " (model.layers.0.mlp.experts) waits for the GPU (aten::_grouped_mm)"
        ]
    )

"""Steps of a model with recurrent layers on a GPU that is not there: decodes alone are graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.rehearsal.steps.plans import scheduled

from kvscope_engine.policy.step_plan import StateSave, StepPlan

HYBRID: dict[str, Any] = {
    "architecture": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": [0, 1],
}
DECODES = (scheduled(1, 50, 1, state_slot=1), scheduled(2, 400, 1, state_slot=2), scheduled(3, 15, 1, state_slot=3))


def convolution(
    values: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, *_: Any, **__: Any
) -> Any:
    """Its shape: torch's own asks the device for memory even of tensors without data."""
    pad = padding[0] if isinstance(padding, tuple) else padding
    return values.new_empty(*values.shape[:-2], weight.shape[0], values.shape[-1] + 2 * pad - weight.shape[-1] + 1)


@pytest.fixture
def runner(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.nn.functional, "conv1d", convolution)
    made = fake_gpu.make_runner(**HYBRID)
    made.warm_up(lambda _: None)
    assert made.notes == []
    return made


def test_decodes_are_a_graph_whatever_is_copied_and_kept(fake_gpu: Any, runner: Any) -> None:
    keeps = StateSave(DECODES[2].request, 16, 9)
    plans = {
        "decodes": StepPlan(DECODES, 3),
        "goes on from a kept state": StepPlan(DECODES, 3, state_copies=((8, 1),)),
        "keeps a state": StepPlan(DECODES, 3, state_saves=(keeps,)),
    }
    for name, plan in plans.items():
        fake_gpu.seen.clear()
        runner.run(plan)
        assert (fake_gpu.seen.replays, fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (1, 1, 1), name
        assert fake_gpu.seen.launches["copy_rows"] == (name != "decodes"), name


def test_whoever_has_no_state_yet_runs_without_a_graph(fake_gpu: Any, runner: Any) -> None:
    for _ in range(2):
        fake_gpu.seen.clear()
        runner.run(StepPlan((*DECODES[:2], scheduled(4, 0, 1, state_slot=4)), 3))
        assert fake_gpu.seen.replays == 0
    runner.run(StepPlan((DECODES[0], scheduled(5, 0, 40, state_slot=5)), 1))
    assert fake_gpu.seen.replays == 0

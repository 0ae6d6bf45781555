"""Random weights: reproducible by seed, of the right dtype, without changing the global random state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_engine.model.loader.model_loader import random_model
from kvscope_telemetry.messages.telemetry import Progress

CPU = torch.device("cpu")


@pytest.fixture
def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)


def test_same_seed_gives_the_same_weights(config: Any) -> None:
    first, again, other = (
        dict(random_model(config, torch.float32, CPU, seed, lambda _: None).named_parameters()) for seed in (1, 1, 2)
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_random_model_has_the_dtype_and_reports_progress(config: Any, progress_events: list[Progress]) -> None:
    model: Any = random_model(config, torch.bfloat16, CPU, 0, progress_events.append)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.isfinite(model(torch.tensor([[1, 2]])).logits).all()
    assert [progress.stage for progress in progress_events] == ["load", "load"]


def test_global_random_state_is_unchanged(config: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_model(config, torch.float32, CPU, 0, lambda _: None)
    assert torch.equal(torch.rand(3), expected)

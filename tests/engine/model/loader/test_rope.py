"""Context limits, and rotary embeddings that would change with the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_engine.model.loader.model_loader import freeze_rope, resolve_max_model_len
from kvscope_telemetry.errors import BadInput

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 16,
}


def config_of(kind: str = "llama", **options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **SMALL | options)


def model_of(config: Any) -> Any:
    """Return a model with random weights for the configuration."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(("asked", "length"), [(None, 64), (64, 64), (1, 1)])
def test_context_within_the_limit_is_accepted(asked: int | None, length: int) -> None:
    assert resolve_max_model_len(config_of(), asked, "x") == length


@pytest.mark.parametrize(
    ("options", "asked", "limit"),
    [
        ({}, 65, "64"),
        ({"rope_parameters": DYNAMIC}, 65, "64 with its rotary embedding of type 'dynamic'"),
        ({"rope_parameters": LONGROPE}, 17, "16 with its rotary embedding of type 'longrope'"),
    ],
)
def test_context_beyond_the_limit_is_refused(options: dict[str, Any], asked: int, limit: str) -> None:
    with pytest.raises(BadInput, match=f"max_model_len={asked} is not accepted: model 'x' can do {limit}"):
        resolve_max_model_len(config_of(**options), asked, "x")


def test_longrope_context_stays_below_its_switch() -> None:
    assert resolve_max_model_len(config_of(rope_parameters=LONGROPE), None, "x") == 16
    phi = config_of("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    assert resolve_max_model_len(phi, None, "x") == 16


def test_model_without_a_limit_needs_max_model_len() -> None:
    config = SimpleNamespace(max_position_embeddings=None, rope_parameters=None)
    assert resolve_max_model_len(config, 10, "x") == 10
    with pytest.raises(BadInput, match="give max_model_len"):
        resolve_max_model_len(config, None, "x")


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE])
def test_frozen_rope_is_the_same_below_the_limit(parameters: dict[str, Any]) -> None:
    config = config_of(rope_parameters=parameters)
    length = resolve_max_model_len(config, None, "x")
    ids = torch.arange(length)[None] % 64
    model = model_of(config)
    with torch.inference_mode():
        expected = model(ids).logits
        freeze_rope(model)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE])
def test_frozen_rope_does_not_depend_on_the_batch(parameters: dict[str, Any]) -> None:
    model = model_of(config_of(rope_parameters=parameters))
    freeze_rope(model)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 64), torch.tensor([[500]]))
    assert torch.equal(rotary.inv_freq, before)


def test_rope_of_each_layer_type_is_frozen() -> None:
    parameters = {
        "full_attention": DYNAMIC,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = config_of("gemma3_text", num_hidden_layers=2, rope_parameters=parameters, head_dim=16)
    assert resolve_max_model_len(config, None, "x") == 64
    model = model_of(config)
    freeze_rope(model)
    assert set(model.model.rotary_emb.rope_type.values()) == {"default"}


def test_other_rope_types_are_not_frozen() -> None:
    model = model_of(config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    freeze_rope(model)
    assert model.model.rotary_emb.rope_type == "linear"

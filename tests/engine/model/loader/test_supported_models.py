"""Supported architectures pass; others are refused by name before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_telemetry.errors import BadInput

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(model_type: str, **options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **options)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "phi3", "olmo2", "smollm3"]
)
def test_supported_architecture_is_accepted(kind: str) -> None:
    experts = {"num_local_experts": 4} if kind == "gpt_oss" else {}
    config = config_of(kind, **SMALL, **experts, head_dim=16, pad_token_id=0)
    plan = blueprint(config, "x")
    assert plan.architecture.endswith("ForCausalLM")
    assert 128 * 64 < plan.num_parameters < 2_000_000


def test_tied_weights_count_once() -> None:
    separate, tied = (
        blueprint(config_of("llama", **SMALL, tie_word_embeddings=tie), "x").num_parameters for tie in (False, True)
    )
    assert separate - tied == 128 * 64


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (
            "openai-gpt",
            {"n_layer": 2, "n_head": 4},
            "0 of the 2 layers of OpenAIGPTLMHeadModel .* does not accept transformers' cache",
        ),
        ("t5", {}, "t5 is an encoder-decoder"),
        ("bart", {}, "bart is an encoder-decoder"),
        ("whisper", {}, "whisper is an encoder-decoder"),
        ("vit", {}, "vit is not a causal language model"),
        ("llama", SMALL | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized with gptq"),
        ("llama", SMALL | {"pad_token_id": 5000}, "llama"),
    ],
)
def test_unsupported_architecture_is_refused_by_name(kind: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refused:
        blueprint(config_of(kind, **options), "the-model")
    assert "'the-model'" in str(refused.value)
    assert "\n" not in str(refused.value)

"""Models that our attention cannot serve are refused by name; others are measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.model.layers.attention.paged_attention import AttentionOptions
from kvscope_engine.model.layers.own_forward import own_forward
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_telemetry.errors import BadInput

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def make(model_type: str, **changes: Any) -> nn.Module:
    """Return a tiny model made without our loader, which would refuse some of these."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(AutoConfig.for_model(model_type, **(SIZES | changes))).eval()
    return model


def why_not_ours(module: nn.Module) -> str:
    """Return why our attention does not run: the model is refused, or run by transformers' own code."""
    try:
        check_hook(module)
    except BadInput as error:
        return str(error)
    own = own_forward(module)
    return own.reason if own is not None else ""


def test_attention_options_of_each_layer_are_found(tiny_loaded: Callable[..., LoadedModel]) -> None:
    module = tiny_loaded("gemma2").module
    calls = check_hook(module)
    assert [call.layer for call in calls] == [0, 1]
    assert {call.shape for call in calls} == {LayerShape(2, 16)}
    assert [call.options for call in calls] == [
        AttentionOptions(scale=0.25, sliding_window=8, softcap=50.0),
        AttentionOptions(scale=0.25, sliding_window=None, softcap=50.0),
    ]
    assert check_hook(module) is calls, "the result must be cached"
    sinks = check_hook(tiny_loaded("gpt_oss").module)[0].options.sinks
    assert sinks is not None
    assert sinks.shape == (4,)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("xlstm", {"num_heads": 4}, r"xLSTMForCausalLM is not supported"),
        ("openai-gpt", {"n_layer": 2, "n_head": 4}, r"OpenAIGPTLMHeadModel is not supported"),
    ],
)
def test_unsupported_model_is_refused_by_name(model_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        check_hook(make(model_type, **changes))


def test_encoder_decoder_is_refused() -> None:
    module = make("llama")
    module.config.is_encoder_decoder = True  # type: ignore[union-attr]
    with pytest.raises(BadInput, match=r"LlamaForCausalLM is not supported: it is an encoder-decoder"):
        check_hook(module)


def attention_of(module: Any, layer: int) -> Any:
    return module.model.layers[layer].self_attn


def test_layer_that_does_not_call_attention_is_detected() -> None:
    module = make("llama")
    attention_of(module, 1).forward = lambda hidden_states, **_: (hidden_states, None)
    assert re.search(r"1 of its 2 layers", why_not_ours(module))


def test_layer_that_attends_twice_is_detected() -> None:
    module = make("llama")
    attention = attention_of(module, 0)
    forward = attention.forward
    attention.forward = lambda **kwargs: (forward(**kwargs)[0] + forward(**kwargs)[0], None)
    assert re.search(r"2 of its 2 layers .* \(3 calls\)", why_not_ours(module))


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "needs position_bias"),
        ({"is_causal": False}, "is not causal"),
        ({"paged": None}, "does not pass keyword arguments on"),
    ],
)
def test_unsupported_attention_argument_is_refused(added: dict[str, Any], reason: str) -> None:
    module = make("llama")
    attention = attention_of(module, 1)
    forward = attention.forward
    attention.forward = lambda **kwargs: forward(**(kwargs | added))
    assert re.search(reason, why_not_ours(module))


def test_custom_mask_is_refused() -> None:
    module = make("llama")
    attention = attention_of(module, 0)
    forward = attention.forward
    attention.forward = lambda **kwargs: forward(**(kwargs | {"attention_mask": torch.zeros(1, 1, 5, 5)}))
    assert re.search("uses its own mask", why_not_ours(module))


def test_window_that_is_only_in_the_mask_is_refused() -> None:
    module = make("mistral", sliding_window=3)
    for layer in range(2):
        attention = attention_of(module, layer)
        attention.config = module.config
        forward = attention.forward
        type(attention)
        attention.forward = _without_window(attention, forward)
    assert re.search(r"its sliding window \(3\) is not passed", why_not_ours(module))


def _without_window(attention: Any, forward: Any) -> Any:
    """Mistral's attention reads the window from its configuration: give it one without."""

    def without(**kwargs: Any) -> Any:
        from copy import copy

        original, changed = attention.config, copy(attention.config)
        changed.sliding_window = None
        attention.config = changed
        try:
            return forward(**kwargs)
        finally:
            attention.config = original

    return without


def test_model_that_ignores_positions_is_refused() -> None:
    """It counts tokens from 0 in every call, like a model that takes positions from a missing cache."""
    module: Any = make("llama")
    rotary = module.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(module)


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_weight_with_nan_or_infinity_is_named(value: float, what: str) -> None:
    module = make("llama")
    attention_of(module, 1).k_proj.weight.data[3, 4] = value
    with pytest.raises(BadInput, match=rf"its weight model\.layers\.1\.self_attn\.k_proj\.weight holds {what}"):
        check_hook(module)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 0}),
        ("gemma2", {"head_dim": 16, "attn_logit_softcapping": 0.0}),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": -1}),
    ],
)
def test_failing_trial_run_is_refused_in_one_line(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="a trial run failed") as refused:
        check_hook(make(model_type, **changes))
    assert "\n" not in str(refused.value)


def test_window_as_long_as_the_context_is_ignored() -> None:
    """PhiMoE has such a window and does not pass it to attention."""
    options = {"num_local_experts": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    assert len(check_hook(make("phimoe", sliding_window=64, **options))) == 2
    module = make("phimoe", sliding_window=63, **options)
    assert re.search(r"its sliding window \(63\) is not passed", why_not_ours(module))

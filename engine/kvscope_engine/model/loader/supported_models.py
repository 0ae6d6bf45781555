"""Refuses unsupported models before weights are read, based on their configuration and the modules that the
configuration describes.

Covers only the cases that can be detected early; `hook_check` later verifies attention by running the model. Must not
depend on weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvscope_engine.model.hf_config import FIRST_POSITION
from kvscope_engine.model.layers.attention_interface import uses_interface
from kvscope_engine.model.loader.text_part import causal_refusal, make_model, text_config
from kvscope_engine.model.quantization.quantization_recipe import METHODS
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kvscope_telemetry.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Properties of a model, determined without weights."""

    architecture: str
    num_parameters: int
    has_states: bool = False
    """Whether the model has recurrent layers with per-request states."""


def blueprint(config: PretrainedConfig, name: str) -> Blueprint:
    """Return the properties of the text model that `config` describes.

    Raises BadInput, naming model and architecture, if it is not supported.
    """
    from kvscope_engine.model.layers.attention.first_position import first_position
    from kvscope_engine.model.layers.own_forward import accepts_cache
    from kvscope_engine.model.layers.recurrent.recurrent_layers import is_recurrent_layer

    _check_config(config, name)
    skeleton = _skeleton(config, name)
    architecture = type(skeleton).__name__
    num_layers = getattr(text_config(skeleton.config), "num_hidden_layers", None)  # without layers for images
    if not isinstance(num_layers, int):
        raise BadInput(f"model {name!r} is not supported: {config.model_type} does not say how many layers it has")
    if first := first_position(skeleton):  # earlier rows of its table are not positions
        setattr(text_config(config), FIRST_POSITION, first)
    kinds = Counter(type(module) for module in skeleton.modules())
    num_attention = sum(count for kind, count in kinds.items() if uses_interface(kind))
    has_states = any(is_recurrent_layer(kind) for kind in kinds)  # a trial run determines later how each layer is run
    if num_attention < num_layers and not has_states and not accepts_cache(skeleton):
        raise BadInput(
            f"model {name!r} is not supported: {num_attention} of the {num_layers} layers of {architecture} use "
            "transformers' attention interface; the model has no known recurrent layers and does not accept "
            "transformers' cache"
        )
    return Blueprint(architecture, sum(parameter.numel() for parameter in skeleton.parameters()), has_states)


def check_options_with_states(config: EngineConfig, plan: Blueprint, name: str) -> None:
    """Raise BadInput, naming the option, for options that are not supported with recurrent layers."""
    if not plan.has_states:
        return
    refused = (
        ("allocator", config.allocator, "paged", "recurrent states need the paged block pool"),
        ("tensor_parallel_size", config.tensor_parallel_size, 1, "recurrent layers cannot be split among ranks"),
        (
            "cpu_offload_gb",
            config.cpu_offload_gb,
            0,
            "weights of recurrent layers cannot be copied to the GPU in each step",
        ),
        ("speculative_config", config.speculative_config, None, "a state cannot be reset after a rejected draft"),
    )
    refuse_options(refused, name, f"{plan.architecture} has recurrent layers")


def refuse_options(options: Sequence[tuple[str, Any, Any, str]], name: str, common_reason: str) -> None:
    """Raise BadInput for the first option that does not have the accepted value.

    `options`: name, value, accepted value, and the reason specific to the option. `common_reason` applies to all.
    """
    for option, value, accepted, reason in options:
        if value != accepted:
            raise BadInput(f"{option}={value!r} is not accepted with model {name!r}: {common_reason}, and {reason}")


def _check_config(config: PretrainedConfig, name: str) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(
            f"model {name!r} is not supported: {kind} is an encoder-decoder model; only decoder-only models are "
            "supported"
        )
    reason = causal_refusal(config)
    if reason:
        raise BadInput(f"model {name!r} is not supported: {kind} {reason}")
    settings_by_config = (getattr(part, "quantization_config", None) for part in (config, text_config(config)))
    quantization = next((settings for settings in settings_by_config if settings is not None), None)
    if quantization is not None:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise BadInput(
            f"model {name!r} is not supported: its weights are quantized with {method!s:.40}; supported are "
            f"{METHODS}, GGUF files, and weights in 16 or 32 bits"
        )


def _skeleton(config: PretrainedConfig, name: str) -> torch.nn.Module:
    """Create the modules on the meta device, without memory for weights."""
    try:
        with torch.device("meta"):
            return make_model(config)
    except Exception as error:  # inconsistent sizes raise all kinds of errors
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"model {name!r} is not accepted: {config.model_type}: {line:.200}") from error

"""Loads a checkpoint with quantized layers as a module with dequantized weights, with access to the stored weights.

Converts a folder's tensors to a module. Other modules decide which layers use the stored weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.quantization.packed_words import TENSOR_NAMES, words_of
from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_engine.model.quantization.scaled_weights import ScaledWeight, plain_tensors, scaled_weights
from kvscope_engine.model.quantization.stored_weight import set_stored_weight_readers
from kvscope_engine.model.stored_tensor import ComputedTensor, StoredTensor
from kvscope_telemetry.errors import BadInput

Build = Callable[[dict[str, Any]], nn.Module]
_WORDS_SUFFIX: Final = ".qweight"
_LAYERS: Final = "layers."


def load_quantized(
    folder: Path,
    stored: dict[str, StoredTensor],
    recipe: Recipe,
    dtype: torch.dtype,
    build: Build,
    *,
    keeps_stored: bool,
) -> tuple[nn.Module, str]:
    """Load the checkpoint in `folder` as a module. Returns the module, and a message about weights whose stored format
    is not used (or an empty string).

    `build` creates the module from dequantized weights in `dtype`. It receives tensors or stand-ins that are read with
    `[...]`, so that weights are dequantized only as they are read. With `keeps_stored`, each layer's stored weight
    remains available (`read_stored_weight`).

    Raises BadInput for tensors with inconsistent shapes.
    """
    try:
        weights = _word_weights(stored, recipe) if recipe.is_in_words else scaled_weights(stored, recipe)
    except BadInput as error:
        raise BadInput(f"the model in {str(folder)!r} cannot be loaded: {error}") from error
    tensors = plain_tensors(stored, weights, dtype)
    module = build(tensors)
    return module, _attach_stored(module, weights, tensors) if keeps_stored else ""


def _word_weights(stored: dict[str, StoredTensor], recipe: Recipe) -> list[ScaledWeight]:
    prefixes = [name.removesuffix(_WORDS_SUFFIX) for name in stored if name.endswith(_WORDS_SUFFIX)]
    if not prefixes:
        raise BadInput(f"it has no layer with packed weights, although its format is {recipe.method}")
    return [_word_weight(stored, prefix, recipe) for prefix in prefixes]


def _word_weight(stored: dict[str, StoredTensor], prefix: str, recipe: Recipe) -> ScaledWeight:
    names = [f"{prefix}.{part}" for part in TENSOR_NAMES]
    words = words_of({name: stored[name].read() for name in names if name in stored}, prefix, recipe)
    return ScaledWeight(
        f"{prefix}.weight",
        frozenset(names),
        lambda dtype: words.widened().to(dtype),
        words.grouped,
        words.is_in_order,
    )


def _attach_stored(module: Any, weights: list[ScaledWeight], tensors: dict[str, Any]) -> str:
    num_unordered = num_quantized = 0
    layers = _linear_layers(module)
    for weight in weights:
        tensor: ComputedTensor = tensors[weight.target]
        layer = layers.get(_below_layers(weight.target.removesuffix(".weight"))) if tensor.was_read else None
        if layer is None or weight.grouped is None:
            continue  # part of the model that is not used, or that transformers fuses with others
        num_quantized += 1
        if weight.is_in_order:
            set_stored_weight_readers(layer, [weight.grouped])
        else:
            num_unordered += 1
    if not num_unordered:
        return ""
    return (
        f"{num_unordered} of {num_quantized} quantized layers store their inputs in the order of activations "
        "(desc_act), which kvscope's products do not support, so their weights are widened"
    )


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by name, without the prefix before `layers.`, which differs in multimodal models."""
    return {
        _below_layers(name): submodule for name, submodule in module.named_modules() if type(submodule) is nn.Linear
    }


def _below_layers(name: str) -> str:
    start = name.find(_LAYERS)
    return name if start < 0 else name[start:]

"""Loads a checkpoint with quantized layers as a module with dequantized weights, keeping access to the stored ones.

Owns the conversion of a folder's tensors to a module. Which layers use the stored weights is decided later.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.quantization.filed_weight import keep_filed
from kvscope_engine.model.quantization.packed_words import PARTS, words_of
from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_engine.model.quantization.scaled_weights import ScaledWeight, plain_tensors, scaled_weights
from kvscope_engine.model.stored_tensor import ComputedTensor, StoredTensor
from kvscope_telemetry.errors import BadInput

Build = Callable[[dict[str, Any]], nn.Module]
_MARK: Final = ".qweight"
_LAYERS: Final = "layers."


def load_quantized(
    folder: Path, stored: dict[str, StoredTensor], recipe: Recipe, dtype: torch.dtype, build: Build, *, keeps: bool
) -> tuple[nn.Module, str]:
    """Load the module of `folder`. Returns it and one line about weights that could not be kept, or an empty text.

    `build` makes the module from dequantized weights in `dtype`. It receives tensors or stand-ins that are read with
    `[...]`, so that only the weights being read are dequantized at a time. With `keeps`, each layer's stored weight
    remains available (`filed_weight`). Raises BadInput for tensors with inconsistent shapes.
    """
    try:
        weights = _in_words(stored, recipe) if recipe.is_in_words else scaled_weights(stored, recipe)
    except BadInput as error:
        raise BadInput(f"the model in {str(folder)!r} cannot be loaded: {error}") from error
    tensors = plain_tensors(stored, weights, dtype)
    module = build(tensors)
    return module, _keep(module, weights, tensors) if keeps else ""


def _in_words(stored: dict[str, StoredTensor], recipe: Recipe) -> list[ScaledWeight]:
    prefixes = [name.removesuffix(_MARK) for name in stored if name.endswith(_MARK)]
    if not prefixes:
        raise BadInput(f"it holds no layer in words, as {recipe.method} has them")
    return [_of_words(stored, prefix, recipe) for prefix in prefixes]


def _of_words(stored: dict[str, StoredTensor], prefix: str, recipe: Recipe) -> ScaledWeight:
    names = [f"{prefix}.{part}" for part in PARTS]
    words = words_of({name: stored[name].read() for name in names if name in stored}, prefix, recipe)
    return ScaledWeight(
        f"{prefix}.weight",
        frozenset(names),
        lambda dtype: words.widened().to(dtype),
        words.grouped,
        words.is_in_order,
    )


def _keep(module: Any, weights: list[ScaledWeight], tensors: dict[str, Any]) -> str:
    unordered = kept = 0
    layers = _linear_layers(module)
    for weight in weights:
        made: ComputedTensor = tensors[weight.target]
        layer = layers.get(_below_layers(weight.target.removesuffix(".weight"))) if made.was_read else None
        if layer is None or weight.grouped is None:
            continue  # part of the model that is not used, or that transformers fuses with others
        kept += 1
        if weight.is_in_order:
            keep_filed(layer, [weight.grouped])
        else:
            unordered += 1
    if not unordered:
        return ""
    return (
        f"{unordered} of {kept} quantized layers have their inputs in the order of activations (desc_act): no"
        " product here reads that, so their weights are widened"
    )


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by their names below `layers.`, which are the same in files of models with and without
    other parts."""
    return {_below_layers(name): part for name, part in module.named_modules() if type(part) is nn.Linear}


def _below_layers(name: str) -> str:
    place = name.find(_LAYERS)
    return name if place < 0 else name[place:]

"""A model whose checkpoint holds quantized layers, loaded with plain weights and, at hand, those of the file.

Owns the way from a folder's tensors to a module. Which layers run on the file's own weights is decided later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.quantized.filed_weight import keep_filed
from kvscope_engine.model.quantized.recipe import Recipe
from kvscope_engine.model.quantized.words import PARTS, Words, words_of
from kvscope_telemetry.errors import BadInput

Build = Callable[[dict[str, torch.Tensor]], nn.Module]
_MARK = ".qweight"


def load_quantized(
    files: Sequence[Path], recipe: Recipe, dtype: torch.dtype, build: Build, *, keeps: bool
) -> tuple[nn.Module, str]:
    """The module that `build` makes of plain weights in `dtype`, and a line about what it could not keep, or nothing.

    With `keeps` each layer's weight of the file is at hand (`filed_weight`). Raises BadInput for tensors that do not
    fit each other.
    """
    tensors = _read(files)
    try:
        words = _words(tensors, recipe)
    except BadInput as error:
        raise BadInput(f"the model in {str(files[0].parent)!r} cannot be loaded: {error}") from error
    plain = {name: tensor for name, tensor in tensors.items() if not _is_of(name, words)}
    module = build(plain | {f"{prefix}.weight": each.widened().to(dtype) for prefix, each in words.items()})
    return module, _keep(module, words) if keeps else ""


def _words(tensors: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, Words]:
    prefixes = [name.removesuffix(_MARK) for name in tensors if name.endswith(_MARK)]
    if not prefixes:
        raise BadInput(f"it holds no layer in words, as {recipe.method} has them")
    return {prefix: words_of(tensors, prefix, recipe) for prefix in prefixes}


def _read(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    return tensors


def _is_of(name: str, words: dict[str, Words]) -> bool:
    prefix, _, part = name.rpartition(".")
    return prefix in words and part in PARTS


def _keep(module: Any, words: dict[str, Words]) -> str:
    unordered = 0
    for prefix, each in words.items():
        if each.is_in_order:
            keep_filed(module.get_submodule(prefix), [each.grouped])
        else:
            unordered += 1
    if not unordered:
        return ""
    return (
        f"{unordered} of {len(words)} quantized layers have their inputs in the order of activations (desc_act): no"
        " product here reads that, so their weights are widened"
    )

"""Chooses, when a model is loaded, the format in which its weights are used: unquantized or in fewer bits.

Clients see a label, which depends on the device:

| weights                                           | label on a GPU | label on a CPU       |
|---------------------------------------------------|----------------|----------------------|
| 4-bit checkpoint, run in its format               | `int4`         | `int4`               |
| 8-bit checkpoint, run in its format               | (dequantized)  | `int8`               |
| FP8 checkpoint, run in its format                 | `fp8`          | (dequantized)        |
| quantized at load (`--quantization int4`, `int8`) | `int4`, `int8` | `int4-a8`, `int8-a8` |
| quantized at load (`--quantization fp8`)          | `fp8-a8`       | (refused)            |
| checkpoint's format (`--quantization a8`)         | (refused)      | `int4-a8`, `int8-a8` |

`-a8`: activations are rounded to 8 bits too (docs/internals/decisions/0017-activations-keep-their-precision.md).
"""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.model.layers.fused.int8_linear import can_round
from kvscope_engine.model.loader.gguf.gguf_blocks import main_bits
from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_kernels.cpu.library import library
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

AS_STORED: Final = "as_stored"
"""Quantization that runs each layer in the checkpoint's weight format if kernels support that format, and dequantizes
the layer's weights otherwise.

Activations are not quantized.
"""
AS_STORED_A8: Final = "a8"
"""Quantization that differs from AS_STORED in two ways: activations are rounded to 8 bits, and layers in
unsupported formats get 8-bit weights.
"""


def choose_quantization(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    recipe: Recipe | None = None,
    file: GgufFile | None = None,
) -> str:
    """Return `none`, `int8`, `int4`, `fp8`, AS_STORED or AS_STORED_A8.

    `file`: the model's GGUF file, if any (`gguf_file`).

    The automatic choice generates the same tokens as dequantized weights. 8-bit activations do not (the default model's
    perplexity changes by 0.5 %, and so do its answers), so they must be requested.

    Raises BadInput if the device, dtype or machine does not support the requested quantization.
    """
    requested = config.quantization
    if requested == "auto":
        return AS_STORED if _reads_as_stored(config, device, dtype, recipe, file) else "none"
    if requested != "none":
        _check(requested, device, dtype)
    return requested


def quantization_label(quantization: str, device: torch.device, bits: int) -> str:
    """Return the quantization label for clients; empty for unquantized weights.

    The label is `int4`, `int8` or `fp8`, followed by `-a8` if activations are rounded too. `bits` is the bit width of
    the checkpoint's integer weights, or 0 if it has none; AS_STORED with 0 bits means FP8.
    """
    if quantization == "none":
        return ""
    if quantization == "fp8":
        return "fp8-a8"
    if quantization == AS_STORED and not bits:
        return "fp8"
    weights = quantization if quantization.startswith("int") else f"int{bits or 8}"
    return weights if device.type != "cpu" or quantization == AS_STORED else f"{weights}-a8"


def option_of(quantization: str) -> str:
    """Return the value of `--quantization` that selects `quantization`; empty for unquantized weights."""
    return {"none": "", AS_STORED: "auto"}.get(quantization, quantization)


def stored_bits(recipe: Recipe | None, file: GgufFile | None) -> int:
    """Return the bit width of most of the checkpoint's weights, 4 or 8; 0 if all are dequantized."""
    if recipe is not None:
        return recipe.bits
    return 0 if file is None else main_bits(file.header)


def _reads_as_stored(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, recipe: Recipe | None, file: GgufFile | None
) -> bool:
    # Packed weights of a checkpoint cannot be divided among ranks: they are dequantized first.
    if config.tensor_parallel_size > 1:
        return False
    if device.type == "cuda":
        return recipe is not None and (recipe.bits == 4 or recipe.is_fp8)
    return library() is not None and dtype != torch.float16 and stored_bits(recipe, file) > 0


def _check(quantization: str, device: torch.device, dtype: torch.dtype) -> None:
    if refusal := quantization_refusal(quantization, device, dtype):
        raise BadInput(f"quantization={quantization!r} is not accepted{refusal}")


def quantization_refusal(quantization: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why weights cannot be quantized this way, as the end of a sentence; empty if they can be."""
    if device.type != "cpu":
        return " on a GPU: 8-bit activations run only on a CPU" if quantization == AS_STORED_A8 else ""
    if quantization == "fp8":
        return " on a CPU, which cannot multiply FP8 matrices: use int8 or int4"
    if dtype == torch.float16:
        return " with float16 on a CPU: bfloat16 or float32"
    if quantization in ("int8", AS_STORED_A8) and not can_round():
        return ": it needs a C compiler (cc, gcc or clang) on a Linux machine and a cache folder of one's own"
    return ""

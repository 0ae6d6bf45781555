"""Chooses how many bits a model's weights have when it runs, once, at load."""

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

FILED: Final = "filed"
"""Each layer as its file holds it, where that can be read, else widened; activations as they are."""
FILED_A8: Final = "a8"
"""The same with activations rounded to 8 bits, and 8 bits for layers whose file's form cannot be read."""


def choose_quantization(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    recipe: Recipe | None = None,
    file: GgufFile | None = None,
) -> str:
    """`none`, `int8`, `int4`, `fp8`, FILED or FILED_A8; `file` is the model's (`gguf_file`).

    Raises BadInput for what this device, type or machine does not do.

    What is chosen by itself keeps the tokens of widened weights. Activations of 8 bits do not (the default model's
    perplexity changes by 0.5 %, and what it says at all): they are for those who ask.
    """
    wanted = config.quantization
    if wanted == "auto":
        return FILED if _reads_filed(config, device, dtype, recipe, file) else "none"
    if wanted != "none":
        _check(wanted, device, dtype)
    return wanted


def shown(quantization: str, device: torch.device, bits: int) -> str:
    """As a client reads it: `int4` or `int8`, with `-a8` where activations are rounded too; nothing for weights as they
    come. `bits` are the file's, 0 where it has none; read as it lies with 0, it is of FP8."""
    if quantization == "none":
        return ""
    if quantization == "fp8":
        return "fp8-a8"
    if quantization == FILED and not bits:
        return "fp8"
    weights = quantization if quantization.startswith("int") else f"int{bits or 8}"
    return weights if device.type != "cpu" or quantization == FILED else f"{weights}-a8"


def option_of(quantization: str) -> str:
    """What `--quantization` gives it; nothing for weights as they come."""
    return {"none": "", FILED: "auto"}.get(quantization, quantization)


def filed_bits(recipe: Recipe | None, file: GgufFile | None) -> int:
    """Those that most of the file's weights have, 4 or 8; 0 for none that are read as they lie."""
    if recipe is not None:
        return recipe.bits
    return 0 if file is None else main_bits(file.header)


def _reads_filed(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, recipe: Recipe | None, file: GgufFile | None
) -> bool:
    if config.tensor_parallel_size > 1:  # of a share, no file's groups are known
        return False
    if device.type == "cuda":
        return recipe is not None and (recipe.bits == 4 or recipe.is_fp8)
    return library() is not None and dtype != torch.float16 and filed_bits(recipe, file) > 0


def _check(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    if refusal := quantization_refusal(wanted, device, dtype):
        raise BadInput(f"quantization={wanted!r} is not accepted{refusal}")


def quantization_refusal(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why weights cannot be quantized so, as the end of a sentence ("... is not accepted"), or ""."""
    if device.type != "cpu":
        return " on a GPU: 8-bit activations run only on a CPU" if wanted == FILED_A8 else ""
    if wanted == "fp8":
        return " on a CPU, which has no product of FP8: int8 or int4"
    if dtype == torch.float16:
        return " with float16 on a CPU: bfloat16 or float32"
    if wanted in ("int8", FILED_A8) and not can_round():
        return ": it needs a C compiler (cc, gcc or clang) on a Linux machine and a cache folder of one's own"
    return ""

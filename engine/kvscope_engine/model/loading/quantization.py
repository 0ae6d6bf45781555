"""How many bits a model's weights have when it runs: decided once, at load."""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.gguf.file import GgufFile
from kvscope_engine.model.joined.int8_linear import can_round, is_fast
from kvscope_engine.model.quantized.gguf_blocks import holds_4_bits
from kvscope_engine.model.quantized.recipe import Recipe
from kvscope_telemetry.errors import BadInput

FILE_TYPE: Final = "general.file_type"
WHOLE: Final = (0, 1, 32)
"""Of that key: float32, float16, bfloat16. A file that does not say is taken for one of them."""
FILED: Final = "filed"
"""Each layer as its file holds it, where that can be read, else of 8 bits."""


def choose_quantization(
    config: EngineConfig,
    name: ModelName,
    device: torch.device,
    dtype: torch.dtype,
    recipe: Recipe | None = None,
    file: GgufFile | None = None,
) -> str:
    """`none`, `int8`, `int4` or FILED; `file` is the model's (`gguf_file`).

    Raises BadInput for what this device, type or machine does not do.

    Weights that a file holds in 4 or 8 bits, in groups, run as they are there, activations rounded to 8 bits (the
    default model's perplexity changes by 0.5 %); weights that come whole are rounded only for those who ask.
    """
    wanted = config.quantization
    if wanted == "auto":
        return _automatic(config, name, device, recipe, file)
    if wanted != "none":
        _check(wanted, device, dtype)
    return wanted


def shown(quantization: str) -> str:
    """As a person reads it; nothing for weights as they come."""
    return {"none": "", FILED: "int4"}.get(quantization, quantization)


def _automatic(
    config: EngineConfig, name: ModelName, device: torch.device, recipe: Recipe | None, file: GgufFile | None
) -> str:
    is_shared = config.tensor_parallel_size > 1  # of a share, no file's groups are known
    if device.type == "cuda":
        return FILED if recipe is not None and recipe.bits == 4 and not is_shared else "none"
    if config.dtype != "auto" or not is_fast():
        return "none"
    if recipe is not None:
        return "none" if is_shared else FILED if recipe.bits == 4 else "int8"
    if file is None:
        return "int8" if name.kind == "default" else "none"
    header = file.header
    if header.fields.get(FILE_TYPE, 0) in WHOLE:
        return "none"
    return FILED if holds_4_bits(header) and not is_shared else "int8"


def _check(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        return
    if dtype == torch.float16:
        raise BadInput(f"quantization={wanted!r} is not accepted with float16 on a CPU: bfloat16 or float32")
    if wanted == "int8" and not can_round():
        raise BadInput(
            "quantization='int8' is not accepted: it needs a C compiler (cc, gcc or clang) on a Linux machine and a"
            " cache folder of one's own"
        )

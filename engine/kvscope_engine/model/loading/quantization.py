"""Whether a model's weights are rounded to 8 bits when it runs: decided once, at load."""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.gguf.header import check_gguf
from kvscope_engine.model.joined.int8_linear import can_round, is_fast
from kvscope_telemetry.errors import BadInput

FILE_TYPE: Final = "general.file_type"
WHOLE: Final = (0, 1, 32)
"""Of that key: float32, float16, bfloat16. A file that does not say is taken for one of them."""


def choose_quantization(config: EngineConfig, name: ModelName, device: torch.device, dtype: torch.dtype) -> str:
    """`int8` or `none`. Raises BadInput for an `int8` that this device, type or machine does not do.

    Weights that a file holds in 4 or 8 bits, in groups, are hardly changed by it (the default model's perplexity by
    0.2 %); weights that come whole are rounded only for those who ask.
    """
    wanted = config.quantization
    if wanted == "auto":
        is_open = device.type == "cpu" and config.dtype == "auto" and is_fast()
        return "int8" if is_open and _is_rounded(name) else "none"
    if wanted == "int8":
        _check(device, dtype)
    return wanted


def _is_rounded(name: ModelName) -> bool:
    """Whether the weights were rounded to 8 bits or fewer by those who made the file."""
    if name.kind == "default":
        return True
    return name.kind == "gguf" and check_gguf(name.path).fields.get(FILE_TYPE, 0) not in WHOLE


def _check(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu" or dtype == torch.float16:
        found = "a GPU" if device.type != "cpu" else "float16"
        raise BadInput(f"quantization='int8' is not accepted with {found}: a CPU with bfloat16 or float32 is needed")
    if not can_round():
        raise BadInput(
            "quantization='int8' is not accepted: it needs a C compiler (cc, gcc or clang) on a Linux machine and a"
            " cache folder of one's own"
        )

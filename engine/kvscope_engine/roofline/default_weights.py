"""Predicts the format in which the default model's weights will be stored on this machine's CPU, without loading the
model.
"""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.model.loader.gguf.gguf_blocks import main_bits, main_format, packed_bytes
from kvscope_engine.model.loader.gguf.gguf_file import gguf_file
from kvscope_engine.model.loader.quantization_choice import AS_STORED, choose_quantization
from kvscope_engine.roofline.weights_line import file_bits_text, format_size
from kvscope_kernels.cpu.library import library
from kvscope_telemetry.engine_config import EngineConfig

NO_COMPILER: Final = "widened: no working C compiler (cc, gcc or clang), so decoding is slower"
NO_FILE: Final = "as in its file, which is not downloaded yet"


def default_weights() -> tuple[str, bool]:
    """Return a description of the format, and whether the weights are stored as integers of few bits.

    Compiles the CPU kernels if necessary.
    """
    if library() is None:
        return NO_COMPILER, False
    file = gguf_file(parse_model_name("default"))
    if file is None or choose_quantization(EngineConfig(), torch.device("cpu"), torch.float32, None, file) != AS_STORED:
        return NO_FILE, file is None
    text = file_bits_text(main_bits(file.header), main_format(file.header))
    return f"{text}, {format_size(packed_bytes(file.header))} read a step", True

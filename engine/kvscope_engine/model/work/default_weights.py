"""How the default model's weights would be held on this machine's CPU: found without loading it. Owns that forecast."""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.fetching.names import parse_model_name
from kvscope_engine.model.gguf.file import gguf_file
from kvscope_engine.model.joined.int8_linear import can_round
from kvscope_engine.model.loading.quantization import FILED, choose_quantization
from kvscope_engine.model.quantized.gguf_blocks import main_format, packed_bytes
from kvscope_engine.model.work.weights_line import EIGHT_BITS, own_bits, size

NO_COMPILER: Final = "bfloat16: there is no C compiler that works (cc, gcc or clang), and decoding is slower without"
NO_INSTRUCTIONS: Final = "bfloat16: this CPU has no dot products of 8 bits (AVX-512 VNNI)"


def default_weights() -> tuple[str, bool]:
    """In words, and whether they are of few bits. Compiles the CPU's products, if nobody did before."""
    name = parse_model_name("default")
    file = gguf_file(name)
    quantization = choose_quantization(EngineConfig(), name, torch.device("cpu"), torch.bfloat16, None, file)
    if quantization == "none":
        return NO_INSTRUCTIONS if can_round() else NO_COMPILER, False
    if quantization != FILED or file is None:
        return EIGHT_BITS, True
    return f"{own_bits(main_format(file.header))}, {size(packed_bytes(file.header))} read a step", True

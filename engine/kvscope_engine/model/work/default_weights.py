"""How the default model's weights would be held on this machine's CPU: found without loading it. Owns that forecast."""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.fetching.default_model import default_place
from kvscope_engine.model.fetching.names import parse_model_name
from kvscope_engine.model.gguf.header import check_gguf
from kvscope_engine.model.joined.int8_linear import can_round
from kvscope_engine.model.loading.quantization import FILED, choose_quantization
from kvscope_engine.model.quantized.gguf_blocks import main_format, packed_bytes
from kvscope_engine.model.work.weights_line import EIGHT_BITS, own_bits, size

NO_COMPILER: Final = "bfloat16: there is no C compiler that works (cc, gcc or clang), and decoding is slower without"
NO_INSTRUCTIONS: Final = "bfloat16: this CPU has no dot products of 8 bits (AVX-512 VNNI)"


def default_weights() -> tuple[str, bool]:
    """In words, and whether they are of few bits. Compiles the CPU's products, if nobody did before."""
    quantization = choose_quantization(EngineConfig(), parse_model_name("default"), torch.device("cpu"), torch.bfloat16)
    if quantization == "none":
        return NO_INSTRUCTIONS if can_round() else NO_COMPILER, False
    if quantization != FILED:
        return EIGHT_BITS, True
    header = check_gguf(default_place())
    return f"{own_bits(main_format(header))}, {size(packed_bytes(header))} read a step", True

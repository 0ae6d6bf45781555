"""The line that describes how weights are stored and how many bytes a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader import quantization_choice
from kvscope_engine.model.loader.gguf.gguf_blocks import Q4_1, Q8_0
from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, TensorLocation
from kvscope_engine.model.loader.quantization_choice import AS_STORED
from kvscope_engine.model.quantization.stored_weight import name_format
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_engine.roofline import default_weights
from kvscope_engine.roofline.step_costs import ModelWork
from kvscope_engine.roofline.weights_line import format_size, weights_line

Load = Callable[..., LoadedModel]
PLAIN = FusedCounts(2, 2, 5, 2, False, True)


def test_weights_line_describes_the_layers(tiny_loaded: Load) -> None:
    loaded, work = tiny_loaded("llama"), ModelWork(kinds={}, weights_bytes=66_000_000, head_bytes=32_000_000)
    name_format(loaded.module, "Q4_1")

    def line_of(quantization: str, *, int8: int = 0, int4: int = 0) -> str:
        found = replace(loaded, quantization=quantization)
        return weights_line(found, replace(PLAIN, int8=int8, int4=int4), work)

    assert line_of("none") == "weights: float32, widened from the file (Q4_1), 98 MB read a step"
    rounded = "8-bit activations, 98 MB read a step"
    assert line_of("int8", int8=9) == f"weights: 8 bits (int8, as asked for), {rounded}"
    assert line_of("int4", int8=1, int4=8) == f"weights: 4 bits (int4, as asked for), {rounded}"
    assert line_of("fp8", int8=8) == f"weights: 8 bits (fp8, as asked for), {rounded}"
    assert line_of(AS_STORED, int8=1, int4=8) == "weights: the file's own 4 bits (Q4_1), 98 MB read a step"
    assert line_of("a8", int8=1, int4=8) == f"weights: the file's own 4 bits (Q4_1), {rounded}"
    name_format(loaded.module, "Q8_0")
    assert line_of(AS_STORED, int8=9) == "weights: the file's own 8 bits (Q8_0), 98 MB read a step"
    name_format(loaded.module, "MXFP4")
    experts = replace(PLAIN, experts=2, packed_experts=2)
    assert weights_line(loaded, experts, None) == "weights: float32, experts in the file's own 4 bits (MXFP4)"
    name_format(loaded.module, "")
    assert weights_line(loaded, PLAIN, None) == "weights: float32"


def test_step_of_one_token_reads_only_its_share_of_the_experts() -> None:
    work = ModelWork(kinds={}, weights_bytes=10, head_bytes=5, expert_bytes=80, expert_share=0.25)
    assert work.weights_read(1, 1) == 35
    assert work.weights_read(1, 0) == 30


def test_model_sizes_are_formatted_in_mb_and_gb() -> None:
    sizes = {120_000: "0.1 MB", 98_200_000: "98 MB", 999_400_000: "999 MB", 16_060_000_000: "16.1 GB"}
    assert {num: format_size(num) for num in sizes} == sizes


def test_weights_of_the_default_model_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    header = GgufHeader(
        shapes={"token_embd.weight": (64, 32), "blk.0.attn_q.weight": (64, 64), "output_norm.weight": (64,)},
        locations={
            "token_embd.weight": TensorLocation(Q8_0, 0, 2176),
            "blk.0.attn_q.weight": TensorLocation(Q4_1, 2176, 2560),
            "output_norm.weight": TensorLocation(0, 4736, 256),
        },
    )
    compiles: list[object] = [object()]
    monkeypatch.setattr(quantization_choice, "library", lambda: compiles[0])
    monkeypatch.setattr(default_weights, "library", lambda: compiles[0])
    file = GgufFile(Path("default.gguf"))
    file.header = header
    monkeypatch.setattr(default_weights, "gguf_file", lambda _: file)
    assert default_weights.default_weights() == ("the file's own 4 bits (Q4_1), 0.0 MB read a step", True)
    assert default_weights.packed_bytes(header) == 64 * 32 * 9 // 8 + 64 * 64 * 5 // 8 + 4 * 64
    header.locations["output.weight"] = header.locations[
        "token_embd.weight"
    ]  # the table is only looked up in this case
    header.shapes["output.weight"] = (64, 64)
    assert default_weights.packed_bytes(header) == 64 * 64 * 9 // 8 + 64 * 64 * 5 // 8 + 4 * 64
    monkeypatch.setattr(default_weights, "gguf_file", lambda _: None)
    assert default_weights.default_weights() == (default_weights.NO_FILE, True)
    compiles[0] = None
    assert default_weights.default_weights() == (default_weights.NO_COMPILER, False)

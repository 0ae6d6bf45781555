"""Automatic choice of weight quantization, which never rounds, and refused options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvscope_engine.model.loader import quantization_choice
from kvscope_engine.model.loader.gguf.gguf_blocks import Q4_0, Q4_1, Q8_0
from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, TensorLocation
from kvscope_engine.model.loader.quantization_choice import (
    AS_STORED,
    choose_quantization,
    quantization_label,
    stored_bits,
)
from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GPTQ = Recipe("gptq", 4, 128, 1)


def file_of(kind: int) -> GgufFile:
    file = GgufFile(Path("some.gguf"))
    file.header = GgufHeader(locations={"a": TensorLocation(kind, 0, 90), "b": TensorLocation(0, 90, 9)})
    return file


def chosen(
    config: EngineConfig,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe | None = None,
    file: GgufFile | None = None,
) -> str:
    return choose_quantization(config, device, dtype, recipe, file)


@pytest.fixture(autouse=True)
def _compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_choice, "library", object)
    monkeypatch.setattr(quantization_choice, "can_round", lambda: True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_automatic_choice_uses_the_bits_of_a_gguf_file(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Q4_0, Q4_1, Q8_0):
        assert chosen(EngineConfig(), CPU, dtype, file=file_of(kind)) == AS_STORED
    assert chosen(EngineConfig(dtype="float32"), CPU, dtype, file=file_of(Q4_1)) == AS_STORED
    assert chosen(EngineConfig(), CPU, dtype) == "none"
    assert chosen(EngineConfig(), CPU, dtype, file=file_of(14)) == "none"  # Q6_K
    assert chosen(EngineConfig(), CPU, torch.float16, file=file_of(Q4_1)) == "none"
    assert chosen(EngineConfig(), GPU, dtype, file=file_of(Q4_1)) == "none"
    assert chosen(EngineConfig(quantization="none"), CPU, dtype, file=file_of(Q4_1)) == "none"
    assert chosen(EngineConfig(tensor_parallel_size=2), CPU, dtype, file=file_of(Q4_1)) == "none"
    monkeypatch.setattr(quantization_choice, "library", lambda: None)
    assert chosen(EngineConfig(), CPU, dtype, file=file_of(Q4_1)) == "none"


def test_automatic_quantization_keeps_checkpoint_weights_quantized_where_supported() -> None:
    assert chosen(EngineConfig(), recipe=GPTQ) == AS_STORED
    assert chosen(EngineConfig(), GPU, torch.float16, GPTQ) == AS_STORED
    assert chosen(EngineConfig(), GPU, recipe=Recipe("gptq", 8, 128, 1)) == "none"
    assert chosen(EngineConfig(), recipe=Recipe("gptq", 8, 128, 1)) == AS_STORED
    assert chosen(EngineConfig(), GPU, recipe=Recipe("fp8", 0, tile=(128, 128))) == AS_STORED
    assert chosen(EngineConfig(), recipe=Recipe("fp8", 0)) == "none"
    assert chosen(EngineConfig(tensor_parallel_size=2), recipe=GPTQ) == "none"
    assert chosen(EngineConfig(tensor_parallel_size=2), GPU, recipe=GPTQ) == "none"


def test_displayed_quantization_name_depends_on_option_device_and_file() -> None:
    of_4, of_8 = stored_bits(None, file_of(Q4_1)), stored_bits(Recipe("gptq", 8, 128, 1), None)
    assert (of_4, of_8, stored_bits(None, file_of(14)), stored_bits(None, None)) == (4, 8, 0, 0)
    assert [quantization_label(each, CPU, of_4) for each in ("none", AS_STORED, "a8")] == ["", "int4", "int4-a8"]
    assert [quantization_label(each, CPU, 0) for each in ("int8", "int4", "a8")] == ["int8-a8", "int4-a8", "int8-a8"]
    assert [quantization_label(each, GPU, 0) for each in ("fp8", AS_STORED)] == ["fp8-a8", "fp8"]
    assert [quantization_label(each, GPU, of_4) for each in ("int8", "int4", AS_STORED)] == ["int8", "int4", "int4"]


def test_unsupported_quantization_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EngineConfig(quantization="int8")
    assert chosen(wanted, GPU) == "int8"
    with pytest.raises(BadInput, match="with float16"):
        chosen(wanted, CPU, torch.float16)
    with pytest.raises(BadInput, match="'int4' is not accepted with float16"):
        chosen(EngineConfig(quantization="int4"), CPU, torch.float16)
    with pytest.raises(BadInput, match="'fp8' is not accepted on a CPU"):
        chosen(EngineConfig(quantization="fp8"))
    assert chosen(EngineConfig(quantization="fp8"), GPU) == "fp8"
    with pytest.raises(BadInput, match="'a8' is not accepted on a GPU"):
        chosen(EngineConfig(quantization="a8"), GPU)
    assert chosen(EngineConfig(quantization="a8")) == "a8"
    monkeypatch.setattr(quantization_choice, "can_round", lambda: False)
    for name in ("int8", "a8"):
        with pytest.raises(BadInput, match="C compiler"):
            chosen(EngineConfig(quantization=name))
    assert chosen(EngineConfig(quantization="int4")) == "int4"
    assert chosen(EngineConfig(quantization="int4"), GPU, torch.float16) == "int4"
    with pytest.raises(BadInput, match="quantization='int3'"):
        EngineConfig(quantization="int3")
    with pytest.raises(BadInput, match="tensor_parallel_size=2"):
        EngineConfig(quantization="int4", tensor_parallel_size=2)

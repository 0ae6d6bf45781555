"""Who gets weights of fewer bits without asking, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.gguf import file
from kvscope_engine.model.gguf.header import GgufHeader, TensorPlace
from kvscope_engine.model.loading import quantization
from kvscope_engine.model.loading.quantization import FILE_TYPE, FILED, choose_quantization, shown
from kvscope_engine.model.quantized.gguf_blocks import Q4_1, Q8_0
from kvscope_engine.model.quantized.recipe import Recipe
from kvscope_telemetry.errors import BadInput

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEFAULT, FOLDER = ModelName("default", "default"), ModelName("folder", "x", Path("x"))
GPTQ = Recipe("gptq", 4, 128, 1)


def header_of(kind: int, file_type: int = 3) -> GgufHeader:
    return GgufHeader({FILE_TYPE: file_type}, places={"a": TensorPlace(kind, 0, 90), "b": TensorPlace(0, 90, 9)})


def chosen(
    config: EngineConfig,
    name: ModelName,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe | None = None,
) -> str:
    return choose_quantization(config, name, device, dtype, recipe, file.gguf_file(name))


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in the place of the default model's, on a CPU that is fast at it; its header is of 4 bits."""
    path = tmp_path / "default.gguf"
    path.touch()
    monkeypatch.setattr(quantization, "is_fast", lambda: True)
    monkeypatch.setattr(file, "default_place", lambda: path)
    monkeypatch.setattr(file, "check_gguf", lambda _: header_of(Q4_1))
    return path


def test_automatic_is_for_files_that_were_rounded_before(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(EngineConfig(), DEFAULT) == FILED
    assert chosen(EngineConfig(), FOLDER) == "none"
    assert chosen(EngineConfig(), DEFAULT, GPU) == "none"
    assert chosen(EngineConfig(dtype="bfloat16"), DEFAULT) == "none"
    assert chosen(EngineConfig(quantization="none"), DEFAULT) == "none"
    assert chosen(EngineConfig(tensor_parallel_size=2), DEFAULT) == "int8"
    for header, expected in ((header_of(Q8_0), "int8"), (header_of(Q4_1, 1), "none")):
        monkeypatch.setattr(file, "check_gguf", lambda _, header=header: header)
        assert chosen(EngineConfig(), DEFAULT) == expected
    default.unlink()
    assert chosen(EngineConfig(), DEFAULT) == "int8"
    monkeypatch.setattr(quantization, "is_fast", lambda: False)
    assert chosen(EngineConfig(), DEFAULT) == "none"


def test_automatic_of_quantized_checkpoints(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(EngineConfig(), FOLDER, recipe=GPTQ) == FILED
    assert chosen(EngineConfig(), FOLDER, GPU, torch.float16, GPTQ) == FILED
    assert chosen(EngineConfig(), FOLDER, GPU, recipe=Recipe("gptq", 8, 128, 1)) == "none"
    assert chosen(EngineConfig(), FOLDER, recipe=Recipe("gptq", 8, 128, 1)) == "int8"
    assert chosen(EngineConfig(tensor_parallel_size=2), FOLDER, recipe=GPTQ) == "none"
    assert chosen(EngineConfig(tensor_parallel_size=2), FOLDER, GPU, recipe=GPTQ) == "none"
    assert [shown(each) for each in ("none", "int8", "int4", FILED)] == ["", "int8", "int4", "int4"]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EngineConfig(quantization="int8")
    assert chosen(wanted, DEFAULT, GPU) == "int8"
    with pytest.raises(BadInput, match="with float16"):
        chosen(wanted, DEFAULT, CPU, torch.float16)
    with pytest.raises(BadInput, match="'int4' is not accepted with float16"):
        chosen(EngineConfig(quantization="int4"), DEFAULT, CPU, torch.float16)
    monkeypatch.setattr(quantization, "can_round", lambda: False)
    with pytest.raises(BadInput, match="C compiler"):
        chosen(wanted, DEFAULT)
    assert chosen(EngineConfig(quantization="int4"), DEFAULT) == "int4"
    assert chosen(EngineConfig(quantization="int4"), DEFAULT, GPU, torch.float16) == "int4"
    with pytest.raises(BadInput, match="quantization='int3'"):
        EngineConfig(quantization="int3")
    with pytest.raises(BadInput, match="tensor_parallel_size=2"):
        EngineConfig(quantization="int4", tensor_parallel_size=2)

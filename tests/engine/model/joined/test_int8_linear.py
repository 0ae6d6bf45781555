"""Weights of 8 bits in a model: nearly the model it was, smaller, counted; and who gets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.checks.trial import TrialContext
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.joined.fuse import weights_bytes
from kvscope_engine.model.joined.int8_linear import Int8Linear, can_round
from kvscope_engine.model.loading import quantization
from kvscope_engine.model.loading.loader import LoadedModel
from kvscope_engine.model.loading.quantization import choose_quantization
from kvscope_engine.model.loading.ready_to_run import make_ready_to_run
from kvscope_engine.model.memory.weights_by_part import weights_by_part
from kvscope_telemetry.errors import BadInput

Load = Callable[..., LoadedModel]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_library = pytest.mark.skipif(not can_round(), reason="needs a C compiler")


def logits_of(module: Any) -> torch.Tensor:
    positions = torch.arange(6)[None]
    with torch.inference_mode():
        given = {"input_ids": positions + 4, "position_ids": positions, "use_cache": False, "paged": TrialContext()}
        logits: torch.Tensor = module(**given).logits
    return logits.float()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_logits_are_nearly_those_of_the_model(model_type: str, dtype: torch.dtype, tiny_loaded: Load) -> None:
    module = tiny_loaded(model_type).module.to(dtype)
    expected = logits_of(module)
    assert make_ready_to_run(module, "int8").int8 >= 8
    found = logits_of(module)
    assert float((found - expected).norm()) <= 0.1 * float(expected.norm())


@needs_library
def test_plain_weights_are_given_up_and_packed_ones_counted(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    before = weights_bytes(module)
    found = make_ready_to_run(module, "int8")
    assert not found.packed
    rounded = [part for part in module.modules() if isinstance(part, Int8Linear)]
    assert len(rounded) == found.int8
    assert weights_bytes(module) < before
    assert sum(part.num_bytes for part in weights_by_part(module)) == weights_bytes(module)
    assert make_ready_to_run(module, "int8") is found


def chosen(
    config: EngineConfig, name: ModelName, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16
) -> str:
    return choose_quantization(config, name, device, dtype)


def test_automatic_is_for_files_that_were_rounded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "is_fast", lambda: True)
    default, folder = ModelName("default", "default"), ModelName("folder", "x", Path("x"))
    assert chosen(EngineConfig(), default) == "int8"
    assert chosen(EngineConfig(), folder) == "none"
    assert chosen(EngineConfig(), default, GPU) == "none"
    assert chosen(EngineConfig(dtype="bfloat16"), default) == "none"
    assert chosen(EngineConfig(quantization="none"), default) == "none"
    monkeypatch.setattr(quantization, "is_fast", lambda: False)
    assert chosen(EngineConfig(), default) == "none"


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, name = EngineConfig(quantization="int8"), ModelName("default", "default")
    with pytest.raises(BadInput, match="with a GPU"):
        chosen(wanted, name, GPU)
    with pytest.raises(BadInput, match="with float16"):
        chosen(wanted, name, CPU, torch.float16)
    monkeypatch.setattr(quantization, "can_round", lambda: False)
    with pytest.raises(BadInput, match="C compiler"):
        chosen(wanted, name)
    with pytest.raises(BadInput, match="quantization='int3'"):
        EngineConfig(quantization="int3")

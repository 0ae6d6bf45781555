"""Preparing a loaded model: verified, float32 logits, fused parts; done once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.model.layers.fused.float32_head import Float32Head
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_get_float32_logits(tiny_loaded: Callable[..., LoadedModel], dtype: torch.dtype) -> None:
    """In 16 bits the most likely tokens tie, and the lower token id would win."""
    module: Any = tiny_loaded("llama").module.to(dtype)
    found = make_ready_to_run(module)
    assert found.layers == 2
    assert isinstance(module.get_output_embeddings(), Float32Head)
    assert make_ready_to_run(module) is found


def test_float32_model_keeps_its_head(tiny_loaded: Callable[..., LoadedModel]) -> None:
    module: Any = tiny_loaded("llama").module
    make_ready_to_run(module)
    assert not isinstance(module.get_output_embeddings(), Float32Head)

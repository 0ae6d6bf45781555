"""Linear layers with 4- and 8-bit weights in a model: nearly the same logits, smaller, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.model.layers.fused import grouped_linear, round_linears
from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear, can_round
from kvscope_engine.model.layers.fused.packed_linear import FusedLinear, can_pack
from kvscope_engine.model.layers.weight_bytes import weights_by_part, weights_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.quantization.stored_weight import set_stored_weight_readers
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.model.verification.trial import TrialContext
from kvscope_kernels import grouped_product as product
from kvscope_kernels.quantized_linear import fp8, grouped_weight
from kvscope_kernels.quantized_linear.fp8 import GpuFp8, rounded_fp8

Load = Callable[..., LoadedModel]
CPU = torch.device("cpu")
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
def test_int8_logits_are_close_to_the_model(model_type: str, dtype: torch.dtype, tiny_loaded: Load) -> None:
    module = tiny_loaded(model_type).module.to(dtype)
    expected = logits_of(module)
    assert make_ready_to_run(module, "int8").int8 >= 8
    found = logits_of(module)
    assert float((found - expected).norm()) <= 0.1 * float(expected.norm())


@needs_library
def test_plain_weights_are_freed_and_quantized_ones_counted(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    before = weights_bytes(module)
    found = make_ready_to_run(module, "int8")
    assert not found.packed
    rounded = [part for part in module.modules() if isinstance(part, Int8Linear)]
    assert len(rounded) == found.int8
    assert weights_bytes(module) < before
    assert sum(part.num_bytes for part in weights_by_part(module)) == weights_bytes(module)
    assert make_ready_to_run(module, "int8") is found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_int4_logits_are_close_to_those_of_the_rounded_weights(
    model_type: str, dtype: torch.dtype, tiny_loaded: Load
) -> None:
    """The head keeps 8 bits if the CPU supports them."""
    module: Any = tiny_loaded(model_type).module.to(dtype)
    head = module.get_output_embeddings()
    for part in module.modules():
        if type(part) is torch.nn.Linear and part is not head:
            part.weight.copy_(grouped_weight.rounded(part.weight).widened())
    expected, before = logits_of(module), weights_bytes(module)
    found = make_ready_to_run(module, "int4")
    assert (found.int4, found.int8) == (8, int(can_round()))
    assert len([part for part in module.modules() if isinstance(part, GroupedLinear)]) == 8
    assert float((logits_of(module) - expected).norm()) <= 0.1 * float(expected.norm())
    assert sum(part.num_bytes for part in weights_by_part(module)) == weights_bytes(module) < before


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_checkpoint_int4_weights_are_used_as_stored_without_rounding_activations(
    model_type: str, dtype: torch.dtype, tiny_loaded: Load
) -> None:
    """Layers that are not quantized in the file run packed, as in an unquantized model."""
    module: Any = tiny_loaded(model_type).module.to(dtype)
    kept = [part for part in module.modules() if type(part) is torch.nn.Linear][:-2]
    for part in kept:
        held = grouped_weight.rounded(part.weight)
        part.weight.copy_(held.widened())
        set_stored_weight_readers(part, [lambda held=held: held])
    expected = logits_of(module.float())
    module = module.to(dtype)
    found = make_ready_to_run(module, "as_stored")
    assert found.int4 > 0
    assert found.int8 == 0
    assert len([part for part in module.modules() if isinstance(part, GroupedLinear)]) == found.int4
    assert not any(isinstance(part, FusedLinear) for part in module.modules()) or not can_pack(dtype, CPU)
    error = float((logits_of(module) - expected).norm() / expected.norm())
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_fp8_rounds_activations_and_keeps_the_head(model_type: str, tiny_loaded: Load) -> None:
    """Uses the reference, since no CPU supports it; weights that are already FP8 values are unchanged."""
    module: Any = tiny_loaded(model_type).module
    head = module.get_output_embeddings()
    for part in module.modules():
        if type(part) is torch.nn.Linear and part is not head:
            part.weight.copy_(rounded_fp8(part.weight).widened())
    expected, before = logits_of(module), weights_bytes(module)
    found = make_ready_to_run(module, "fp8")
    layers = [part for part in module.modules() if isinstance(part, GroupedLinear)]
    assert len(layers) == found.int8 == 8
    assert module.get_output_embeddings() not in layers
    error = float((logits_of(module) - expected).norm() / expected.norm())
    assert 1e-4 < error <= 0.1
    assert sum(part.num_bytes for part in weights_by_part(module)) == weights_bytes(module) < before


def test_failed_fp8_products_are_reported_once_per_shape(tiny_loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates a GPU for which torch has no FP8 product."""

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("not supported\non this card")

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(grouped_linear, "fp8_product", GpuFp8)
    module: Any = tiny_loaded("llama").module
    make_ready_to_run(module, "fp8")
    shapes = {(part.out_features, part.in_features) for part in module.modules() if isinstance(part, GroupedLinear)}
    told: list[str] = []
    round_linears.watch_fp8_failures(module, told.append)
    assert len(told) == len(set(told)) == len(shapes) > 1
    assert all(line.endswith("RuntimeError: not supported on this card") for line in told)


def test_int4_works_without_a_compiler(tiny_loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_loaded("llama").module
    expected = logits_of(module)
    monkeypatch.setattr(product, "library", lambda: None)
    monkeypatch.setattr(round_linears, "can_round", lambda: False)
    found = make_ready_to_run(module, "int4")
    assert (found.int4, found.int8) == (8, 0)
    assert float((logits_of(module) - expected).norm()) <= 0.3 * float(expected.norm())

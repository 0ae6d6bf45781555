"""Float32 logits of 16-bit models: exact near the top of each row, as far as the inputs allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.engine import Engine
from kvscope_engine.model.layers.fused import float32_head
from kvscope_engine.model.layers.fused.float32_head import MAX_NEAR, NEAR_LOGITS, Float32Head, use_float32_logits
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.sampling_params import SamplingParams

VOCABULARY, SIZE = 3000, 96


def make_head(dtype: torch.dtype, spread: float, bias: bool) -> tuple[Float32Head, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(VOCABULARY, SIZE, generator=generator) * spread).to(dtype)
    added = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    head = Float32Head(nn.Parameter(weight, requires_grad=False), added)
    return head, weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spread", "is_flat"), [(0.5, False), (0.02, True)])
@pytest.mark.parametrize("bias", [False, True])
def test_largest_float32_logits_of_a_16_bit_head_equal_exact_products(
    dtype: torch.dtype, spread: float, is_flat: bool, bias: bool
) -> None:
    head, weight = make_head(dtype, spread, bias)
    x = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits = head(x[None])[0]
    expected = x.double() @ weight.t()
    near = expected >= expected.amax(-1, keepdim=True) - NEAR_LOGITS + 0.5
    assert bool((near.sum(-1) > MAX_NEAR).all()) == is_flat
    if head.bias is not None:
        expected = expected + head.bias.double()
    assert logits.dtype == torch.float32
    assert float((logits - expected)[near].abs().max()) < 1e-4
    assert float((logits - expected).abs().max()) < 0.02 * float(expected.abs().max()), "the other logits are rounded"


def test_logits_of_a_row_computed_alone_equal_those_in_a_batch() -> None:
    head, _ = make_head(torch.bfloat16, 0.5, bias=False)
    x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(3)).bfloat16()
    together, alone = head(x), torch.cat([head(row[None]) for row in x])
    assert torch.allclose(together, alone, atol=0.2)
    assert together.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_logits_that_tie_in_16_bits_are_ordered_by_their_float32_values() -> None:
    weight = torch.zeros(300, 2)
    weight[7], weight[200] = torch.tensor([25.0, 0.125]), torch.tensor([25.0, 0.25])
    x = torch.tensor([[1.0, 0.125]])
    assert (x.bfloat16() @ weight.bfloat16().t()).argmax() == 7
    head = Float32Head(nn.Parameter(weight.bfloat16(), requires_grad=False), None)
    assert head(x.bfloat16()).argmax() == 200


def test_only_plain_16_bit_heads_are_replaced(tiny_loaded: Callable[..., LoadedModel]) -> None:
    module: Any = tiny_loaded("llama").module
    assert not use_float32_logits(module)
    module = module.bfloat16()
    assert use_float32_logits(module)
    assert module(input_ids=torch.tensor([[1, 2]]), use_cache=False, paged=_Zeros()).logits.dtype == torch.float32
    assert not use_float32_logits(module), "the head is replaced only once"


class _Zeros:
    def attend(self, _: int, query: torch.Tensor, *__: Any) -> torch.Tensor:
        return torch.zeros_like(query)


def test_torch_without_a_float32_product_falls_back_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_head, "has_float32_product", lambda weight: False)
    head, _ = make_head(torch.bfloat16, 0.5, bias=False)
    rows = torch.ones(1, SIZE).bfloat16()
    assert head._on_gpu(rows).dtype == torch.float32


def test_default_model_in_bfloat16_answers_correctly() -> None:
    with Engine(EngineConfig(device="cpu", dtype="bfloat16", kv_memory_bytes=64 << 20)) as engine:
        answer = next(iter(engine.generate(["What is the capital of France?"], SamplingParams(temperature=0.0))))
    assert answer.text == "The capital of France is Paris."

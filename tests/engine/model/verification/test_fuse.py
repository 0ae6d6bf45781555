"""Fused and packed parts equal what they replace; parts that only look alike are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.recurrent_models import recurrent_model
from torch import nn

from kvscope_engine.model.layers.fused.fused_norm import FastRMSNorm
from kvscope_engine.model.layers.fused.packed_linear import (
    FusedLinear,
    PackedLinear,
    can_pack,
    fast_linear,
    pack_linears,
)
from kvscope_engine.model.layers.weight_bytes import weights_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.tensor_agreement import is_close
from kvscope_engine.model.verification.fuse import fuse_model
from kvscope_engine.model.verification.trial import TrialContext, run_trial

CPU = torch.device("cpu")
MODELS = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
Load = Callable[..., LoadedModel]


def logits_of(module: Any, num_tokens: int = 6) -> torch.Tensor:
    """Return logits with attention that is a fixed function of its layer, for more tokens than the trial used."""
    positions = torch.arange(num_tokens)[None] * 3
    with torch.inference_mode():
        logits: torch.Tensor = module(
            input_ids=positions + 4, position_ids=positions, use_cache=False, paged=TrialContext()
        ).logits
    return logits


@pytest.mark.parametrize("model_type", MODELS)
def test_fused_logits_equal_the_plain_model(model_type: str, tiny_loaded: Load) -> None:
    module = tiny_loaded(model_type).module
    expected = logits_of(module)
    fused = fuse_model(module)
    assert fused.attentions == 2
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-4, atol=1e-4)


def test_fused_bfloat16_differs_only_by_rounding(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    exact = logits_of(module)
    plain = logits_of(module.to(torch.bfloat16)).float()
    fused = fuse_model(module)
    assert fused.layers == 2
    assert fused.float32_residual
    error, allowed = ((x - exact).square().mean().sqrt() for x in (logits_of(module).float(), plain))
    assert float(error) <= 1.1 * float(allowed)


@pytest.mark.parametrize("where", ["norm", "embed_tokens"])
def test_float32_residual_is_not_used_if_a_part_does_not_accept_it(where: str, tiny_loaded: Load) -> None:
    module: Any = tiny_loaded("llama").module.to(torch.bfloat16)
    if where == "norm":  # the norm after the layers accepts no other dtype
        module.model.norm = nn.LayerNorm(64, dtype=torch.bfloat16)
    else:  # the embedding before the layers may have any dtype
        module.model.embed_tokens.register_forward_hook(lambda part, args, output: output * 2)
    expected = logits_of(module).float()
    fused = fuse_model(module)
    assert fused.float32_residual == (where != "norm")
    difference = (logits_of(module).float() - expected).square().mean().sqrt()
    assert float(difference) <= 0.02 * float(expected.square().mean().sqrt())


def test_fusing_without_packing_gives_the_same_logits(tiny_loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_engine.model.verification.fuse.can_pack", lambda dtype, device: False)
    module = tiny_loaded("qwen3").module
    expected, before = logits_of(module), weights_bytes(module)
    assert not fuse_model(module).packed
    assert not any(isinstance(part, PackedLinear) for part in module.modules())
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-4, atol=1e-4)
    assert weights_bytes(module) == pytest.approx(before, rel=0.01)  # except for the fused norms


def test_plain_weights_are_freed_after_packing(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    before = weights_bytes(module)
    if not fuse_model(module).packed:
        pytest.skip("this CPU has no packed layers")
    left = sum(parameter.numel() for parameter in module.parameters())
    assert left == 320 * 64 + 5 * 64, "the embedding and the norms"
    assert weights_bytes(module) == pytest.approx(before, rel=0.01)  # except for the fused norms


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("mlp", lambda module, x: module.down_proj(module.act_fn(module.up_proj(x)) * module.gate_proj(x))),
        ("input_layernorm", lambda module, x: nn.functional.layer_norm(x, x.shape[-1:], module.weight)),
    ],
)
def test_module_that_computes_something_different_than_expected_is_not_fused(
    where: str, change: Any, tiny_loaded: Load
) -> None:
    module: Any = tiny_loaded("llama").module
    odd = getattr(module.model.layers[0], where)
    odd.forward = lambda x: change(odd, x)
    expected = logits_of(module)
    fused = fuse_model(module)
    assert fused.layers == 1
    assert not hasattr(odd, "kvscope_fused")
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-4, atol=1e-4)


def test_attention_with_a_hook_is_not_fused(tiny_loaded: Load) -> None:
    module: Any = tiny_loaded("llama").module
    odd = module.model.layers[1].self_attn
    odd.k_proj.register_forward_hook(lambda part, args, output: output * 1.5)
    expected = logits_of(module)
    assert fuse_model(module).attentions == 1
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-4, atol=1e-4)


def test_module_that_is_called_twice_is_not_fused(tiny_loaded: Load) -> None:
    module: Any = tiny_loaded("llama").module
    layers = module.model.layers
    layers[1].mlp = layers[0].mlp
    assert layers[0].mlp not in run_trial(module).calls
    assert fuse_model(module).mlps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("packed", [True, False])
def test_fused_linear_equals_its_parts(dtype: torch.dtype, biases: tuple[bool, ...], packed: bool) -> None:
    if packed and not can_pack(dtype, CPU):
        pytest.skip("this CPU has no packed layers")
    torch.manual_seed(0)
    parts = [nn.Linear(33, size, bias=bias).to(dtype) for size, bias in zip((7, 20), biases, strict=True)]
    for shape in ((1, 33), (5, 33), (1, 9, 33)):
        x, other = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 27).to(dtype)
        with torch.inference_mode():
            joined = fast_linear(parts, packed)
            expected = torch.cat([part(x) for part in parts], dim=-1)
            assert isinstance(joined, PackedLinear if packed else FusedLinear)
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(joined(x), expected, rtol=bound, atol=bound)
            torch.testing.assert_close(joined.forward_add(x, other), expected + other, rtol=bound, atol=bound)


@pytest.mark.parametrize("family", ["rwkv", "granitemoehybrid"])
def test_linear_layers_of_recurrent_models_are_packed_whatever_their_call_order(family: str) -> None:
    module = recurrent_model(family)
    if not fuse_model(module).packed:
        pytest.skip("this CPU has no packed layers")
    assert [name for name, part in module.named_modules() if type(part) is nn.Linear] == []


def test_only_plain_linears_are_packed() -> None:
    if not can_pack(torch.float32, CPU):
        pytest.skip("this CPU has no packed layers")

    class Special(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 8), Special(8, 8), nn.Sequential(nn.Linear(8, 4)))
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = module(x)
        pack_linears(module, set(module.modules()))
        torch.testing.assert_close(module(x), expected)
    kinds = [type(part) for part in module.modules() if not isinstance(part, nn.Sequential)]
    assert kinds == [PackedLinear, Special, PackedLinear]
    packed = module[0]
    assert isinstance(packed, PackedLinear)
    assert (packed.weight.shape, packed.weight.dtype) == ((8, 8), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_rms_norm_equals_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 40).to(dtype)
    weight = torch.randn(3, 40)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = FastRMSNorm(weight, 1e-5, dtype)(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


def test_tensor_comparison_detects_differences_in_value_dtype_shape_nan_and_structure() -> None:
    one = torch.randn(3, 5)
    assert is_close((one, None), (one + 1e-6, None))
    assert not is_close((one, None), (one * 1.01, None))
    assert not is_close((one,), (one, None))
    assert not is_close(one, one.double())
    assert not is_close(one, one[:2])
    assert not is_close(one * float("nan"), one)
    assert not is_close(None, one)

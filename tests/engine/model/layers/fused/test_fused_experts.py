"""Experts of every kind equal transformers' own; what is another kind stays transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.layers.fused.fused_experts import FusedExperts, experts_candidate, is_faster_on
from kvscope_engine.model.layers.weight_bytes import weights_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.fuse import FusedCounts, fuse_model
from kvscope_engine.model.verification.trial import TrialContext
from kvscope_kernels.fused_moe.expert_weights import RELU_SQUARED, Gate

Load = Callable[..., LoadedModel]
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
LATENT = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("n_group", "num_key_value_heads"), 4),
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 8),
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "glm4_moe": EXPERTS | {"first_k_dense_replace": 0},
    "olmoe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": EXPERTS | LATENT,
}

WITHOUT_LAYERS = ("deepseek_v3", "glm4_moe", "olmoe")
"""Whose attention stays transformers' own, and with it the layer."""


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse on a CPU as on a GPU."""
    monkeypatch.setattr("kvscope_engine.model.verification.fuse.is_faster_on", lambda device: True)


def logits_of(module: Any, num_tokens: int = 7) -> torch.Tensor:
    positions = torch.arange(num_tokens)[None] * 3
    with torch.inference_mode():
        logits: torch.Tensor = module(
            input_ids=positions + 4, position_ids=positions, use_cache=False, paged=TrialContext()
        ).logits
    return logits


def experts_of(kind: str, **options: Any) -> Any:
    """One module of experts as transformers makes it, full of random numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(kind, **sizes | {"pad_token_id": 0, "num_key_value_heads": 2} | EXPERTS | options)
    auto: Any = AutoModelForCausalLM
    module = auto.from_config(config, dtype=torch.float32)
    part = next(part for part in module.modules() if hasattr(part, "has_gate"))
    for index, parameter in enumerate(part.parameters()):
        generator = torch.Generator().manual_seed(index)
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return part


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_said(family: str, tiny_loaded: Load) -> None:
    module = tiny_loaded(family, **FAMILIES[family]).module
    expected, before = logits_of(module), weights_bytes(module)
    fused = fuse_model(module)
    assert fused.experts == 2
    assert fused.layers == (0 if family in WITHOUT_LAYERS else 2)
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-3, atol=1e-3)
    assert weights_bytes(module) == pytest.approx(before, rel=0.01)
    assert not any(isinstance(part, FusedExperts) and part.up.dim() != 3 for part in module.modules())


@pytest.mark.usefixtures("everywhere")
def test_weights_that_four_bits_hold_are_held_in_four(tiny_loaded: Load) -> None:
    """As a file in MXFP4 has them. Those of a layer with one number that the format has not stay as they are."""
    module: Any = tiny_loaded("gpt_oss", **EXPERTS, intermediate_size=64).module
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]) / 32
    for layer in module.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            places = torch.randint(0, 8, weight.shape, generator=torch.Generator().manual_seed(1))
            weight.data = numbers[places] * torch.where(places % 3 == 0, -1.0, 1.0)
    module.model.layers[1].mlp.experts.down_proj.data[3, 7, 9] = 0.3
    expected, before = logits_of(module), weights_bytes(module)
    experts = sum(parameter.nbytes for parameter in module.model.layers[0].mlp.experts.parameters())
    fused = fuse_model(module)
    assert (fused.experts, fused.packed_experts) == (2, 1)
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-3, atol=1e-3)
    assert before - weights_bytes(module) > 0.8 * experts, "of float32"


def test_on_a_cpu_experts_stay_as_they_are(tiny_loaded: Load) -> None:
    module = tiny_loaded("qwen3_moe", **EXPERTS).module
    found: FusedCounts = fuse_model(module)
    assert found.experts == 0
    assert [is_faster_on(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]


@pytest.mark.parametrize(
    ("kind", "options", "gate"),
    [
        ("qwen3_moe", {}, Gate()),
        ("gpt_oss", {}, Gate(alpha=1.702, limit=7.0, shift=1.0)),
        ("deepseek_v4", {"swiglu_limit": 3.0}, Gate(limit=3.0)),
        ("nemotron_h", {"layers_block_type": ["moe"]}, Gate(RELU_SQUARED)),
        ("aria_text", {"moe_num_experts": 6}, Gate()),
    ],
)
def test_what_a_layer_of_experts_gives(kind: str, options: dict[str, Any], gate: Gate) -> None:
    """Of weights in every order that transformers has them in."""
    part = experts_of(kind, **options)
    found = experts_candidate(part)
    assert found is not None
    assert found.gate == gate
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(9, found.down.shape[1], generator=draw) * 3
    shares, ids = torch.randn(9, len(found.up), generator=draw).softmax(-1).topk(2)
    with torch.inference_mode():
        torch.testing.assert_close(found(x, ids, shares), part(x, ids, shares), rtol=1e-4, atol=1e-3)


def test_another_gate_is_left() -> None:
    part = experts_of("qwen3_moe")
    part._apply_gate = lambda both: nn.functional.gelu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]
    assert experts_candidate(part) is None, "not the gelu that has a kernel"
    part._apply_gate = lambda both: nn.functional.silu(both.chunk(2, -1)[0].clamp(max=50)) * both.chunk(2, -1)[1]
    assert experts_candidate(part) is None, "a bound far out"
    part = experts_of("qwen3_moe")
    part.has_post_expert_norm = True
    assert experts_candidate(part) is None
    assert experts_candidate(nn.Linear(4, 4)) is None


@pytest.mark.usefixtures("everywhere")
def test_experts_that_do_something_else_are_left(tiny_loaded: Load) -> None:
    module: Any = tiny_loaded("qwen3_moe", **EXPERTS).module
    odd = module.model.layers[1].mlp.experts
    odd.register_forward_hook(lambda part, args, output: output + args[0])
    expected = logits_of(module)
    assert fuse_model(module).experts == 1
    assert not hasattr(odd, "kvscope_fused")
    torch.testing.assert_close(logits_of(module), expected, rtol=1e-3, atol=1e-3)

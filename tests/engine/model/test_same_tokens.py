"""Architectures with special attention give transformers' tokens: in chunks, in batches, with shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, EngineConfig
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

NUM_TOKENS = 10
GEMMA4 = {"num_hidden_layers": 6, "sliding_window": 8, "global_head_dim": 32, "vocab_size_per_layer_input": 320}
GEMMA4_PLAIN = GEMMA4 | {"hidden_size_per_layer_input": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4, wider global heads": ("gemma4_text", GEMMA4_PLAIN),
    "gemma4, fewer global heads": (
        "gemma4_text",
        GEMMA4_PLAIN | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4, embeddings a layer": ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 8}),
    "gemma4, shared layers": (
        "gemma4_text",
        GEMMA4 | {"hidden_size_per_layer_input": 8, "num_hidden_layers": 12, "num_kv_shared_layers": 6},
    ),
    "gemma4, experts": (
        "gemma4_text",
        GEMMA4_PLAIN | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "granite 4, attention alone": (
        "granitemoehybrid",
        {
            "layer_types": ["attention", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "head_dim": None,
        },
    ),
}

MODELS |= {
    "stablelm": ("stablelm", {"head_dim": None}),
    "stablelm, side by side": (
        "stablelm",
        {"head_dim": None, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "nemotron": ("nemotron", {}),
    "afmoe": (
        "afmoe",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 256, "head_dim": None},
    ),
}


def prompts() -> list[list[int]]:
    """Return prompts of many lengths; the last two share a prefix."""
    found = [random.Random(i).choices(range(3, 300), k=k) for i, k in enumerate((1, 5, 33, 70))]
    return [*found, found[-1][:41] + found[0], found[-1][:41] + found[1]]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MODELS)
def test_tokens_equal_transformers(tmp_path: Path, vivid_model: Callable[..., Any], case: str) -> None:
    model_type, changes = MODELS[case]
    model = vivid_model(model_type, **changes)
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        block_size=4,
        num_gpu_blocks_override=90,
        max_num_batched_tokens=24,
        async_scheduling=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    submits = [Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=sampling) for ids in prompts()]
    with Engine(config) as engine:
        together = [completion.token_ids for completion in engine.generate(submits)]
        again = list(engine.generate(submits[-1:]))
        assert engine.overlaps.overlapped > NUM_TOKENS // 2
    assert together == [greedy(model, ids) for ids in prompts()]
    assert again[0].token_ids == together[-1]
    assert again[0].usage.cached_tokens > 0

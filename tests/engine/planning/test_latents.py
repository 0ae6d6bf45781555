"""Models with MLA latents are planned like their engine stores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.planning.conftest import Make, allocated_peak, close

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.no_attention import NoAttention
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.verification.hook_check import record_calls
from kvscope_engine.planning.inference_plan import InferenceQuestion, forward_shape, plan_inference
from kvscope_engine.planning.plan_answer import build_answer
from kvscope_engine.planning.skeleton import build_model

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 131072,
}
SMALL: dict[str, Any] = DEEPSEEK_V3 | {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "intermediate_size": 512,
    "first_k_dense_replace": 4,
    "vocab_size": 3000,
}


def question(**what: Any) -> InferenceQuestion:
    return InferenceQuestion(**{"gpu_memory": 80 << 30} | what)


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_deepseek_v3_holds_576_numbers_per_token_and_layer(skeleton: Make, tensor_parallel: int) -> None:
    """Every rank holds all of them."""
    plan = plan_inference(skeleton(DEEPSEEK_V3), question(tensor_parallel=tensor_parallel))
    assert plan.kv_bytes_a_token == 4 * 576 * 2 * tensor_parallel
    assert plan.expansion_factor == pytest.approx(49152 / 576 / tensor_parallel), (
        "heads are divided among ranks, latents are not"
    )
    assert plan.fits


def test_memory_plan_of_an_mla_model_states_the_size_of_expanded_keys_and_values(skeleton: Make) -> None:
    small = skeleton(SMALL)
    said = build_answer(small, plan_inference(small, question()), (1024,))
    assert any(
        "with MLA expanded, as keys and values of each head, it would be 18.0 times as large: " in note
        for note in said.inference.notes
    )
    wide, narrow = (plan_inference(small, question(kv_cache_dtype=kind)).tightest for kind in ("auto", "int8"))
    assert narrow.block_bytes / wide.block_bytes == (64 + 64 + 2 * 4) / (2 * (64 + 64)), "two scales per token"


@pytest.mark.filterwarnings("ignore")
def test_planned_kv_and_activations_match_a_cpu(skeleton: Make) -> None:
    """Compared in float32, because bfloat16 products need workspace on some processors."""
    model = skeleton(SMALL)
    shape = forward_shape(model, torch.float32, 512)
    module = build_model(model.config, torch.float32, torch.device("cpu")).eval()
    record_calls(module)
    ids = torch.zeros(512, dtype=torch.int64)
    with torch.inference_mode():
        real = allocated_peak(lambda: Forward(module).fill(ids, ids, NoAttention()))
    assert close(shape.activations, real), f"planned {shape.activations:,}, took {real:,}"
    storage = KVStorage(3, 16, shape.layers, torch.bfloat16, torch.device("cpu"))
    stage = plan_inference(model, question()).tightest
    assert stage.block_bytes * 3 == sum(tensor.nbytes for tensor in storage.block_tensors) == storage.num_bytes

"""Planned memory for serving equals what torch's allocator and an engine on a real GPU used."""

from __future__ import annotations

import pytest
import torch
from tests.engine.planning.conftest import LLAMA_8B, Make, allocated_peak, close

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.no_attention import NoAttention
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.verification.hook_check import record_calls
from kvscope_engine.planning.inference_plan import InferenceQuestion, forward_shape, plan_inference
from kvscope_engine.planning.skeleton import build_model
from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_telemetry.errors import BadInput

GIB = 1 << 30


def _question(**what: object) -> InferenceQuestion:
    return InferenceQuestion(**{"gpu_memory": 24 * GIB} | what)  # type: ignore[arg-type]


def test_llama_8b_plan_matches_an_h100_engine(skeleton: Make) -> None:
    """`resources/kvscope_resources/benchmarks/h100-80gb-2026-11-23.md`: weights 14.96, KV 29.87 of 47.51 GiB."""
    plan = plan_inference(
        skeleton(LLAMA_8B), _question(gpu_memory=int(79.18 * GIB), gpu_memory_utilization=0.6)
    ).tightest
    assert plan.memory.weights / GIB == pytest.approx(14.96, abs=0.01)
    assert plan.memory.kv / GIB == pytest.approx(29.87, rel=0.02)
    assert plan.memory.activations / GIB == pytest.approx(1.1, abs=0.11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planned_weights_kv_and_activations_match_a_cpu(skeleton: Make, dtype: torch.dtype) -> None:
    model = skeleton()
    shape = forward_shape(model, dtype, 512)
    module = build_model(model.config, dtype, torch.device("cpu")).eval()
    record_calls(module)
    ids = torch.zeros(512, dtype=torch.int64)
    with torch.inference_mode():
        real = allocated_peak(lambda: Forward(module).fill(ids, ids, NoAttention()))
    assert close(shape.activations, real), f"planned {shape.activations:,}, took {real:,}"
    name = "float32" if dtype is torch.float32 else "bfloat16"
    stage = plan_inference(model, _question(dtype=name)).tightest
    assert stage.memory.weights == sum(p.numel() * p.element_size() for p in module.parameters())
    storage = KVStorage(3, 16, shape.layers, dtype, torch.device("cpu"))
    assert stage.block_bytes * 3 == sum(tensor.nbytes for tensor in storage.block_tensors)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_cache_includes_its_scales(skeleton: Make, kind: str) -> None:
    model = skeleton()
    wide, narrow = (plan_inference(model, _question(kv_cache_dtype=each)).tightest for each in ("auto", kind))
    head_dim = 192 // 6
    assert narrow.block_bytes / wide.block_bytes == (head_dim + 4) / (2 * head_dim)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_quantized_matrices_take_their_bits_and_scales(skeleton: Make, kind: str, bits: int) -> None:
    wide, narrow = (plan_inference(skeleton(), _question(dtype=each)).tightest for each in ("bfloat16", kind))
    saved_bits = 8 * (wide.memory.weights - narrow.memory.weights) / wide.stage.layers.matrices
    assert 16 - bits - 0.2 < saved_bits < 16 - bits


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3), (2, 2), (6, 4)])
def test_planned_weights_of_all_gpus_add_up_to_the_model(skeleton: Make, tensor: int, pipeline: int) -> None:
    model = skeleton()
    plan = plan_inference(model, _question(tensor_parallel=tensor, pipeline_parallel=pipeline))
    assert sum(len(stage.stage.kv) for stage in plan.stages) == 4
    matrices = sum(stage.stage.layers.matrices + stage.stage.embedding.matrices for stage in plan.stages) * tensor
    assert matrices == model.num_parameters - sum(layer.vectors for layer in model.layers) - model.head.vectors
    for stage in plan.stages:
        memory = stage.memory
        assert memory.needed + memory.others + memory.kv == memory.allowed


def test_tied_head_is_held_by_both_ends_of_a_pipeline(skeleton: Make) -> None:
    model = skeleton(tie_word_embeddings=True)
    one, two = (plan_inference(model, _question(pipeline_parallel=stages)) for stages in (1, 2))
    weights = sum(stage.memory.weights for stage in two.stages) - one.stages[0].memory.weights
    assert weights == 2 * model.embedding.total


def test_memory_plan_rounds_requests_up_to_whole_blocks(skeleton: Make) -> None:
    plan = plan_inference(skeleton(), _question())
    assert plan.requests(17) == plan.num_blocks // 2
    assert plan.num_tokens == 16 * plan.num_blocks


def test_too_small_gpu_does_not_fit_and_gives_the_missing_bytes(skeleton: Make) -> None:
    plan = plan_inference(skeleton(LLAMA_8B), _question(gpu_memory=12 * GIB))
    assert not plan.fits
    assert plan.num_blocks == 0
    assert plan.tightest.memory.kv < 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "fp7"}, "dtype='fp7' is not accepted: must be one of bfloat16"),
        ({"kv_cache_dtype": "int2"}, "kv_cache_dtype='int2' is not accepted: must be one of auto"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 is not accepted"),
        ({"tensor_parallel": 5}, "tensor_parallel=5 is not accepted: 6 query heads"),
        ({"pipeline_parallel": 5}, "pipeline_parallel=5 is not accepted: the model has 4 layers"),
        ({"max_model_len": 2048}, "max_model_len=2048 is not accepted"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 is not accepted"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_inference_plan_option_is_refused_by_name(skeleton: Make, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan_inference(skeleton(), _question(**wrong))
    assert said in str(refused.value)


def test_model_refused_by_the_engine_cannot_be_planned(skeleton: Make) -> None:
    with pytest.raises(BadInput, match="not supported"):
        skeleton({"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100})


GEMMA_3_27B = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "layer_types": None,
}


def test_sliding_windows_hold_only_what_is_read(skeleton: Make) -> None:
    """Gemma 3 27B at 32k tokens has 10 full layers and 52 with a window of 1,024; within 10 % of what they read."""
    model = skeleton(GEMMA_3_27B)
    question = _question(gpu_memory=141 * GIB, max_model_len=32768, max_num_batched_tokens=64)
    plan = plan_inference(model, question)
    token = 2 * 16 * 128 * 2
    ideal = token * (10 * 32768 + 52 * 1024)
    assert ideal <= plan.request_bytes(32768) <= 1.03 * ideal
    assert plan.unfreed_bytes(32768) == token * 62 * 32768
    assert plan.requests(32768) == plan.num_blocks // (2048 + 6 * 65)
    assert plan.kv_bytes_a_token == plan.request_bytes(32768) / 32768
    (stage,) = plan.stages
    assert [(group.rule.window, len(group.layers)) for group in stage.groups] == [(0, 10), *[(1024, 10)] * 5, (1024, 2)]


LLAMA_4_SCOUT = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "attention_chunk_size": 8192,
    "max_position_embeddings": 10485760,
}


def test_memory_plan_of_chunked_attention_layers_counts_only_tokens_within_the_chunk(skeleton: Make) -> None:
    """Llama 4 Scout at 128k tokens has 12 full layers and 36 with chunks of 8,192."""
    question = _question(gpu_memory=400 * GIB, max_model_len=131072, max_num_batched_tokens=64)
    plan = plan_inference(skeleton(LLAMA_4_SCOUT), question)
    ideal = 2 * 8 * 128 * 2 * (12 * 131072 + 36 * 8192)
    assert ideal <= plan.request_bytes(131072) <= 1.03 * ideal
    (stage,) = plan.stages
    assert [(group.rule, len(group.layers)) for group in stage.groups] == [
        (GroupRule(), 12),
        *[(GroupRule(8192, is_chunked=True), 12)] * 3,
    ]


MAMBA = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 16}
HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 0,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


def test_recurrent_states_are_planned(skeleton: Make) -> None:
    """Three of four layers have a state: one slot per request, as many for prefixes, one to copy from, and one for the
    padding rows of CUDA graphs.
    """
    plan = plan_inference(skeleton(HYBRID), _question(gpu_memory=4 * GIB, max_num_seqs=8))
    (stage,) = plan.stages
    one_state = 3 * (128 * 4 * 2 + 4 * 16 * 16 * 4)  # convolution states in bfloat16, recurrent states in float32
    assert (stage.num_states, stage.state_bytes) == (17, 18 * one_state)
    assert stage.num_blocks * stage.block_bytes + stage.state_bytes <= stage.memory.kv
    assert len(stage.stage.kv) == 1
    assert plan.requests(16) == 16
    assert (stage.num_host_states, stage.num_host_blocks) == (0, 0)


def test_recurrent_states_in_host_memory_are_planned(skeleton: Make) -> None:
    """There are as many state slots as run and are cached, in at most half of host memory. Blocks get the rest."""
    one_state = 3 * (128 * 4 * 2 + 4 * 16 * 16 * 4)
    for host, count in ((1 << 20, 16), (20 * one_state, 10)):
        (stage,) = plan_inference(skeleton(HYBRID), _question(max_num_seqs=8, kv_host_memory=host)).stages
        assert (stage.num_host_states, stage.host_state_bytes) == (count, count * one_state)
        assert stage.num_host_blocks == (host - count * one_state) // stage.block_bytes


def test_model_without_kv_cache_is_planned(skeleton: Make) -> None:
    plan = plan_inference(skeleton(MAMBA | {"num_heads": 8}), _question(gpu_memory=4 * GIB, max_model_len=4096))
    assert plan.fits
    assert plan.kv_bytes_a_token == 0
    with pytest.raises(BadInput, match="recurrent layers, which run on one GPU alone"):
        plan_inference(skeleton(HYBRID), _question(tensor_parallel=2))

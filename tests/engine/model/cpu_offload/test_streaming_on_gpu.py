"""Streamed layers on a GPU, where copies and compute really run concurrently: the same tokens as without streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.gpu_notes import faults_in

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.model.cpu_offload.streaming import EAGER_NOTE
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
PROMPTS = [tuple((7 * index + 3 * place) % 250 + 3 for place in range(5 + 60 * index)) for index in range(4)]
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 2,
}
LAYER_BYTES = 2 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 512 * 2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = tmp_path_factory.mktemp("deep")
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Tokens with all weights on the device."""
    return tokens(folder, 0, enforce_eager=True)


@pytest.mark.parametrize("num_layers", [4, 9])
def test_streamed_layers_give_the_same_tokens_on_gpu(
    folder: Path, expected: list[tuple[int, ...]], num_layers: int
) -> None:
    offloaded = (num_layers - 0.5) * LAYER_BYTES / (1 << 30)
    assert tokens(folder, num_layers, cpu_offload_gb=offloaded) == expected


def tokens(folder: Path, num_layers: int, **options: Any) -> list[tuple[int, ...]]:
    """Return greedy tokens with the last `num_layers` layers in host memory."""
    config = EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", kv_memory_bytes=64 << 20, **options)
    with Engine(config) as engine:
        assert faults_in(engine.notes) == ([EAGER_NOTE] if num_layers else []), "host memory is pinned"
        assert engine.memory().host_weights_bytes == num_layers * LAYER_BYTES
        submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY) for prompt in PROMPTS]
        return [completion.token_ids for completion in engine.generate(submits)]

"""What a GPU's memory holds at each moment of a start, for models of 8 and 14 billion parameters: it fits, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.hook_check import check_hook
from kvscope_engine.model.kv_storage import KVStorage, block_bytes
from kvscope_engine.model.loader import LoadedModel, _check_gpu_memory, _make_ready
from kvscope_engine.model.memory import num_blocks_for, plan_memory
from kvscope_engine.model.names import ModelName
from kvscope_engine.model.ready_to_run import make_ready_to_run
from kvscope_engine.model.support import blueprint
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages import ModelInfo

GIB = 1 << 30
CARDS = {24: int(23.6 * GIB), 48: int(47.5 * GIB), 80: int(79.1 * GIB)}
"""What torch says of cards sold as so many GB."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
}
CONFIG = EngineConfig(model="any")


def hf_config(name: str) -> Any:
    from transformers import AutoConfig

    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape, tie_word_embeddings=False)


def load(name: str) -> LoadedModel:
    """As the loader leaves a model: on the GPU, our attention in it."""
    from transformers import AutoModelForCausalLM

    config = hf_config(name)
    auto: Any = AutoModelForCausalLM
    with torch.device("cuda:0"), no_init():
        module = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    _make_ready(module)
    info = ModelInfo(
        name=name,
        architecture=type(module).__name__,
        dtype="bfloat16",
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_parameters=0,
        max_model_len=config.max_position_embeddings,
    )
    device = torch.device("cuda:0")
    return LoadedModel(
        module, config, None, info, frozenset(), device, torch.bfloat16, config.max_position_embeddings
    )


def no_init() -> Any:
    """Weights are not filled: there is nothing to fill."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


@dataclass
class Start:
    """Bytes held at the moments of a start."""

    weights: int
    peak_of_joining: int
    joined: int
    largest_layer: int
    num_blocks: int = 0
    kv: int = 0
    step: int = 0
    allowed: int = 0
    others: int = 0


def start(card: Any, name: str, config: EngineConfig = CONFIG) -> Start:
    """Load, join, profile, take the KV cache."""
    loaded = load(name)
    weights = card.held_bytes()
    layers: Any = loaded.module.get_submodule("model.layers")
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    card.restart_peak()
    fused = make_ready_to_run(loaded.module)
    assert fused.layers == loaded.num_layers
    found = Start(weights, card.peak_bytes(), card.held_bytes(), largest)
    one_block = block_bytes([c.shape for c in check_hook(loaded.module)], config.block_size, loaded.dtype)
    plan = plan_memory(config, loaded, card, one_block)
    found.num_blocks = num_blocks_for(config, loaded, card)
    before = card.held_bytes()
    storage = KVStorage.for_model(loaded, found.num_blocks, config.block_size)
    found.kv = card.held_bytes() - before
    found.step = plan.activations + plan.logits + plan.reserves.attention_partials + plan.reserves.graphs
    found.allowed, found.others = plan.allowed, plan.others
    storage.close()
    return found


@pytest.mark.parametrize(("name", "card"), [("llama-8b", 24), ("llama-8b", 48), ("llama-8b", 80), ("qwen3-14b", 48), ("qwen3-14b", 80)])
def test_a_start_fits_and_uses_what_it_may(name: str, card: int, rehearsed: Callable[..., Any]) -> None:
    with rehearsed(CARDS[card]) as gpu:
        found = start(gpu, name)
    assert found.peak_of_joining <= found.weights + 1.2 * found.largest_layer
    assert found.joined <= 1.001 * found.weights
    taken = found.others + found.joined + found.kv + found.step
    assert 0.95 * found.allowed <= taken <= found.allowed
    assert found.peak_of_joining + found.others <= CARDS[card]


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(rehearsed: Callable[..., Any]) -> None:
    config = hf_config("qwen3-14b")
    plan = blueprint(config, "qwen3-14b")
    name = ModelName("hub", "Qwen/Qwen3-14B")
    with rehearsed(CARDS[24]) as gpu, pytest.raises(KvscopeError) as refused:
        _check_gpu_memory(plan, name, torch.bfloat16, gpu, CONFIG)
    assert str(refused.value) == ""

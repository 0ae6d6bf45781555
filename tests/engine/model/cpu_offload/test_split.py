"""Which layers stay on the host, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.model.cpu_offload.split import check_streaming, large_bytes, layers_for_host, move_others
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

GIB = 1 << 30


@pytest.fixture
def model(vivid_model: Callable[..., Any]) -> Any:
    return vivid_model("llama", num_hidden_layers=6)


@pytest.mark.parametrize(("asked", "first"), [(2.01, 3), (3.0, 3), (3.01, 2), (5.5, 0), (99.0, 0)])
def test_last_layers_stay_on_the_host_up_to_the_given_size(model: Any, asked: float, first: int) -> None:
    size = large_bytes(model.model.layers[0])
    assert layers_for_host(model, asked * size / GIB) == tuple(model.model.layers[first:])


def test_offload_size_that_frees_nothing_is_refused(model: Any) -> None:
    with pytest.raises(BadInput, match=r"cpu_offload_gb=0\.0001 is not accepted: a layer .* so that nothing is freed"):
        layers_for_host(model, 0.0001)


def test_model_with_layers_in_several_lists_is_refused(model: Any) -> None:
    model.config.num_hidden_layers = 7
    with pytest.raises(BadInput, match="LlamaForCausalLM: its layers are not in one list"):
        layers_for_host(model, 1.0)


def test_cpu_offload_moves_all_other_weights_to_the_device_and_tied_ones_stay_tied(
    vivid_model: Callable[..., Any],
) -> None:
    model = vivid_model("llama", num_hidden_layers=4, tie_word_embeddings=True)
    move_others(model, tuple(model.model.layers[1:]), torch.device("meta"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    places = {name: tensor.device.type for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    stays = {name for name, place in places.items() if place == "cpu"}
    assert len(stays) == 3 * 7
    assert all(name.startswith(("model.layers.1", "model.layers.2", "model.layers.3")) for name in stays)
    assert not any("norm" in name for name in stays)


def test_offload_on_a_cpu_or_beyond_host_memory_is_refused_before_loading() -> None:
    config = EngineConfig(device="cpu", cpu_offload_gb=4.0)
    with pytest.raises(BadInput, match=r"cpu_offload_gb=4 is not accepted on a CPU: its weights are in host memory"):
        load_model(config, lambda _: None)
    with pytest.raises(KvscopeError, match=r"no host memory for --cpu-offload-gb 12\.5: 8\.0 GiB are free"):
        check_streaming(12.5, torch.device("cuda:0"), 8 * GIB)
    check_streaming(8.0, torch.device("cuda:0"), 8 * GIB)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True])
def test_invalid_offload_size_is_refused(value: float) -> None:
    with pytest.raises(BadInput, match=r"cpu_offload_gb=.* is not accepted: must be a number of GiB from 0 to"):
        EngineConfig(cpu_offload_gb=value)


def test_offload_with_several_ranks_is_refused() -> None:
    message = r"cpu_offload_gb=2\.0 is not accepted with tensor_parallel_size=2: offloaded weights can be copied to one"
    with pytest.raises(BadInput, match=message):
        EngineConfig(cpu_offload_gb=2.0, tensor_parallel_size=2)

"""How many blocks fit, and what is said when none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.recurrent_models import recurrent_config

from kvscope_engine.model.device_memory.gpu_holders import GpuHolders
from kvscope_engine.model.kv_cache.state_storage import state_bytes
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.runner import pool_size as pool_size_module
from kvscope_engine.model.runner.pool_size import pool_size
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

BLOCK_BYTES = 2 * 2 * 16 * (2 * 16) * 4
"""Two layers, keys and values, 16 slots, two heads of 16, float32."""
Load = Callable[..., LoadedModel]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes the device says are free."""
    return lambda count: monkeypatch.setattr(pool_size_module, "free_bytes", lambda device: count)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="any", device="cpu", **options)


def test_default_is_a_quarter_of_what_is_free_up_to_512_mib(tiny_loaded: Load, free: Any) -> None:
    loaded = tiny_loaded("llama")
    free(400 * BLOCK_BYTES)
    assert pool_size(config(), loaded).num_blocks == 100
    free(1 << 40)
    assert pool_size(config(), loaded).num_blocks == (512 << 20) // BLOCK_BYTES


def test_what_was_asked_for_is_what_is_taken(tiny_loaded: Load, free: Any) -> None:
    loaded = tiny_loaded("llama")
    free(1000 * BLOCK_BYTES)
    assert pool_size(config(num_gpu_blocks_override=700), loaded).num_blocks == 700
    assert pool_size(config(kv_memory_bytes=9 * BLOCK_BYTES + 5), loaded).num_blocks == 9
    assert pool_size(config(num_gpu_blocks_override=3, kv_memory_bytes=1), loaded).num_blocks == 3


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantized_cache_holds_more_blocks(kv_cache_dtype: str, tiny_loaded: Load, free: Any) -> None:
    """16 numbers of a byte and a scale of 4 where there were 64 bytes."""
    free(1000 * BLOCK_BYTES)
    options = {"kv_memory_bytes": 5 * BLOCK_BYTES, "kv_cache_dtype": kv_cache_dtype}
    assert pool_size(config(**options), tiny_loaded("llama")).num_blocks == 5 * 64 // 20


def test_more_than_there_is_is_refused_with_the_numbers(tiny_loaded: Load, free: Any) -> None:
    loaded = tiny_loaded("llama")
    free(1000 * BLOCK_BYTES)
    with pytest.raises(BadInput, match=r"--num-gpu-blocks-override asks for 1001 blocks .* MiB are free on cpu"):
        pool_size(config(num_gpu_blocks_override=1001), loaded)
    with pytest.raises(BadInput, match=r"--kv-memory asks for 2000 blocks"):
        pool_size(config(kv_memory_bytes=2000 * BLOCK_BYTES), loaded)
    with pytest.raises(BadInput, match=rf"--kv-memory 5 is not accepted: one block .* takes {BLOCK_BYTES} bytes"):
        pool_size(config(kv_memory_bytes=5), loaded)


def test_no_free_memory_at_start(tiny_loaded: Load, free: Any) -> None:
    loaded = tiny_loaded("llama")
    free(2 * BLOCK_BYTES)
    with pytest.raises(KvscopeError, match=r"no memory for the KV cache: 0 MiB are left .* one block takes 0\.01 MiB"):
        pool_size(config(), loaded)


class Card:
    """A GPU of 1 GiB, of which nothing is taken."""

    total_bytes = 1 << 30
    num_multiprocessors = 132
    compute_capability = 90
    holders = GpuHolders("")

    def free_bytes(self) -> int:
        return self.total_bytes

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def reserved_bytes(self) -> int:
        return 0

    def promised_bytes(self) -> int:
        return 0

    def draws_display(self) -> bool:
        return False


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_states_of_recurrent_layers_and_blocks_share_what_is_left(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(recurrent_config(family).to_dict() | {"architectures": None}, default=str))
    asked = config(dtype="float32", max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256, enforce_eager=True)
    loaded = load_model(replace(asked, model=f"dummy:{path}"), lambda _: None)
    check_hook(loaded.module)
    one_state = state_bytes(recurrent_layers(loaded.module).states)
    size = pool_size(asked, loaded, Card())
    assert size.plan is not None
    assert size.num_states == 2 * 8 + 1, "one a request, as many for prefixes, and one to copy from"
    one_block = 2 * 2 * 16 * (2 * 8) * 4 if family == "qwen3_next" else 0
    left = size.plan.kv - size.num_states * one_state
    assert size.num_blocks == (left // one_block if one_block else 17 * 256 // 16)
    few = pool_size(replace(asked, kv_memory_bytes=10 * one_state + one_block), loaded, Card())
    assert few.num_states == (5 if one_block else 10)
    with pytest.raises(KvscopeError, match=r"one request's state of its recurrent layers takes"):
        pool_size(replace(asked, kv_memory_bytes=one_state), loaded, Card())

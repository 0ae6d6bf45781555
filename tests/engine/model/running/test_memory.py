"""How many blocks fit, and what is said when none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscope_engine.model.loading.loader import LoadedModel
from kvscope_engine.model.running import memory
from kvscope_engine.model.running.memory import pool_size
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

BLOCK_BYTES = 2 * 2 * 16 * (2 * 16) * 4
"""Two layers, keys and values, 16 slots, two heads of 16, float32."""
Load = Callable[..., LoadedModel]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes the device says are free."""
    return lambda count: monkeypatch.setattr(memory, "free_bytes", lambda device: count)


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

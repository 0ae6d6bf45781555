"""How many blocks fit: from the configuration, the model, and what the device has left.

Owns that sum and its error messages; allocates nothing itself but the profile run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.checks.hook_check import check_hook
from kvscope_engine.model.loading.device import free_bytes
from kvscope_engine.model.running.kv_storage import MIB, LayerShape, block_bytes, storage_dtype
from kvscope_engine.model.running.profile_run import peak_workspace_bytes
from kvscope_engine.model.tiers.build import STAGING_BYTES
from kvscope_telemetry.errors import BadInput, KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel

MAX_DEFAULT_CPU_BYTES: Final = 512 * MIB
DEFAULT_CPU_SHARE: Final = 0.25


def num_blocks_for(config: EngineConfig, loaded: LoadedModel) -> int:
    """Blocks of the pool.

    Raises BadInput when what was asked for is more than is free, KvscopeError when nothing fits at all; both with
    the numbers.
    """
    layers = [call.shape for call in check_hook(loaded.module)]
    one_block = block_bytes(layers, config.block_size, storage_dtype(config.kv_cache_dtype, loaded.dtype))
    free = free_bytes(loaded.device)
    if config.num_gpu_blocks_override is not None:
        return _checked(config.num_gpu_blocks_override, one_block, free, loaded.device, "--num-gpu-blocks-override")
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes < one_block:
            raise BadInput(
                f"--kv-memory {config.kv_memory_bytes} is not accepted: one block of {config.block_size} tokens takes"
                f" {one_block} bytes with this model"
            )
        return _checked(config.kv_memory_bytes // one_block, one_block, free, loaded.device, "--kv-memory")
    room = _default_bytes(config, loaded, layers, free)
    if room < one_block:
        raise KvscopeError(
            f"no memory for the KV cache: {max(room, 0) / MIB:.0f} MiB are left for it on {loaded.device}"
            f" ({free / MIB:.0f} MiB free), one block takes {one_block / MIB:.2f} MiB;"
            " free some, or give --kv-memory, a smaller model or --dtype bfloat16"
        )
    return int(room // one_block)


def _checked(num_blocks: int, one_block: int, free: int, device: torch.device, option: str) -> int:
    if num_blocks * one_block > free:
        raise BadInput(
            f"{option} asks for {num_blocks} blocks of {one_block / MIB:.2f} MiB,"
            f" {num_blocks * one_block / MIB:.0f} MiB in all: {free / MIB:.0f} MiB are free on {device}"
        )
    return num_blocks


def _default_bytes(config: EngineConfig, loaded: LoadedModel, layers: Sequence[LayerShape], free: int) -> int:
    if loaded.device.type != "cuda":
        return int(min(MAX_DEFAULT_CPU_BYTES, DEFAULT_CPU_SHARE * free))
    total = torch.cuda.mem_get_info(loaded.device)[1]
    allowed = int(total * config.gpu_memory_utilization) - (total - free)
    staging = 2 * STAGING_BYTES if config.host_kv_memory_bytes else 0
    return allowed - staging - peak_workspace_bytes(config, loaded, layers)

"""Computes how many KV blocks fit, from the configuration, the model, and the free memory of the device.

Allocates nothing except in the profile run on a GPU. The model's layers must already be fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvscope_engine.model.cpu_offload.streaming import streamed_weights
from kvscope_engine.model.device_memory.device_memory import CudaMemory, DeviceMemory
from kvscope_engine.model.device_memory.memory_plan import PIECEWISE_SHARE, MemoryPlan, drop_large_piecewise_graphs
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import STAGING_BYTES
from kvscope_engine.model.kv_cache.kv_storage import MIB, block_bytes, storage_dtype
from kvscope_engine.model.kv_cache.state_storage import state_bytes
from kvscope_engine.model.layers.own_forward import states_of
from kvscope_engine.model.platforms.device import free_bytes
from kvscope_engine.model.runner.kv_cache_spec import groups_of_model
from kvscope_engine.model.runner.profile_run import step_profile
from kvscope_engine.model.runner.sparse_layers import layer_shapes
from kvscope_engine.model.runner.step_memory import Processors, step_reserves
from kvscope_engine.policy.block_needs import num_blocks_for
from kvscope_engine.policy.state_slots import MIN_SLOTS, host_slots, slots_and_blocks
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

MAX_DEFAULT_CPU_BYTES: Final = 512 * MIB
DEFAULT_CPU_SHARE: Final = 0.25


class PoolSize(NamedTuple):
    """Number of blocks and state slots of the pool, and the memory plan behind it."""

    num_blocks: int
    plan: MemoryPlan | None = None
    """Plan of the GPU's memory; None if the size of the pool was requested or the device is a CPU."""
    num_states: int = 0
    """Number of device slots for the states of recurrent layers, for running requests and cached prefixes together."""
    num_host_states: int = 0
    has_pad_state: bool = False
    """Whether the device has one additional state slot, for the sequences that pad CUDA graphs."""
    memory: DeviceMemory | None = None
    """Memory of the GPU; None on a CPU."""


def pool_size(config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory | None = None) -> PoolSize:
    """Return the size of the pool. The GPU's memory is queried if `memory` is None.

    Raises:
        BadInput: The requested size exceeds free memory.
        KvscopeError: Not even one block fits.
    """
    if memory is None and loaded.device.type == "cuda":
        memory = CudaMemory(loaded.device)
    groups = groups_of_model(config, loaded)
    layers, dtype = layer_shapes(loaded, config.sparse_decode), storage_dtype(config.kv_cache_dtype, loaded.dtype)
    one_block = block_bytes(layers, config.block_size, dtype, [group.layers for group in groups])
    free = free_bytes(loaded.device) if memory is None else memory.free_bytes()
    one_state = state_bytes(states_of(loaded.module))
    if one_state:
        return _size_with_states(config, loaded, memory, free, one_block, one_state, len(groups))
    if config.num_gpu_blocks_override is not None:
        num_blocks, option = config.num_gpu_blocks_override, "--num-gpu-blocks-override"
        return PoolSize(_check_free_bytes(num_blocks, one_block, free, loaded.device, option), memory=memory)
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes < one_block:
            raise BadInput(
                f"--kv-memory {config.kv_memory_bytes} is not accepted: one block of {config.block_size} tokens takes"
                f" {one_block} bytes with this model"
            )
        num_blocks = config.kv_memory_bytes // one_block
        return PoolSize(_check_free_bytes(num_blocks, one_block, free, loaded.device, "--kv-memory"), memory=memory)
    if memory is not None:
        plan = plan_memory(config, loaded, memory, one_block, len(groups))
        plan.check(loaded.info.name, str(loaded.device), memory.holders.describe_with_bytes)
        return PoolSize(plan.kv // one_block, plan, memory=memory)
    headroom = int(min(MAX_DEFAULT_CPU_BYTES, DEFAULT_CPU_SHARE * free))
    if headroom < one_block:
        raise KvscopeError(
            f"no memory for the KV cache: {max(headroom, 0) / MIB:.0f} MiB are left for it on {loaded.device}"
            f" ({free / MIB:.0f} MiB free), one block takes {one_block / MIB:.2f} MiB;"
            " free some, or give --kv-memory, a smaller model or --dtype bfloat16"
        )
    return PoolSize(headroom // one_block)


def _size_with_states(
    config: EngineConfig,
    loaded: LoadedModel,
    memory: DeviceMemory | None,
    free: int,
    one_block: int,
    one_state: int,
    num_groups: int,
) -> PoolSize:
    """Divide the KV memory between KV blocks and states of recurrent layers.

    There is one state per request and some for prefixes; if there are KV layers, states take at most half of the
    memory. Without KV layers, blocks only index prefixes and need no memory. Host memory is divided in the same way.
    """
    pad = int(loaded.device.type == "cuda" and not config.enforce_eager)
    num_prefix_states = config.max_num_seqs if config.state_checkpoints is None else config.state_checkpoints
    num_wanted = config.max_num_seqs + num_prefix_states
    plan = None
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        _check_free_bytes(num_blocks, one_block, free, loaded.device, "--num-gpu-blocks-override")
        num_states = min(num_wanted + 1, (free - num_blocks * one_block) // one_state - pad)
    else:
        if config.kv_memory_bytes is not None:
            num_bytes = config.kv_memory_bytes
            if num_bytes > free:
                raise BadInput(
                    f"--kv-memory asks for {num_bytes / MIB:.0f} MiB: {free / MIB:.0f} MiB are free on {loaded.device}"
                )
        elif memory is not None:
            plan = plan_memory(config, loaded, memory, one_block + (MIN_SLOTS + pad) * one_state, num_groups)
            plan.check(loaded.info.name, str(loaded.device), memory.holders.describe_with_bytes)
            num_bytes = plan.kv
        else:
            num_bytes = int(min(MAX_DEFAULT_CPU_BYTES, DEFAULT_CPU_SHARE * free))
        longest = num_blocks_for(loaded.max_model_len, config.block_size)
        num_states, num_blocks = slots_and_blocks(num_bytes, one_block, one_state, num_wanted, longest, pad)
    if num_states < MIN_SLOTS or num_blocks < 1:
        raise KvscopeError(
            f"no memory for the KV cache of {loaded.info.name!r}: one request's state of its recurrent layers takes"
            f" {one_state / MIB:.2f} MiB, and {MIN_SLOTS + pad} of them and a block of {one_block / MIB:.2f} MiB are"
            " needed; free some, or give more --kv-memory or a smaller model"
        )
    num_host_states = host_slots(config.host_kv_memory_bytes, one_block, one_state, num_wanted)
    return PoolSize(num_blocks, plan, num_states, num_host_states, bool(pad), memory)


def plan_memory(
    config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory, one_block: int, num_groups: int = 1
) -> MemoryPlan:
    """Plan the GPU's memory, after running a full step to measure activations. `one_block` is the bytes of a block.

    CUDA graphs of steps with prefills are left out if they would take too much of the KV cache.
    """
    memory.empty_cache()
    profile = step_profile(config, loaded, memory)
    held, streamed = memory.held_bytes(), streamed_weights(loaded.module)
    processors = Processors(memory.num_multiprocessors, memory.compute_capability)
    plan = MemoryPlan(
        total=memory.total_bytes,
        utilization=config.gpu_memory_utilization,
        others=max(0, memory.total_bytes - memory.free_bytes() - held) + memory.promised_bytes(),
        draws_display=memory.draws_display(),
        weights=held,
        activations=profile.activations,
        logits=profile.logits,
        reserves=step_reserves(config, loaded, processors, num_groups),
        staging=2 * STAGING_BYTES if config.host_kv_memory_bytes else 0,
        kv_min=one_block,
        host_weights=streamed.num_bytes if streamed is not None else 0,
    )
    return drop_large_piecewise_graphs(plan, 1.0 if config.piecewise_graphs else PIECEWISE_SHARE)


def _check_free_bytes(num_blocks: int, one_block: int, free: int, device: torch.device, option: str) -> int:
    if num_blocks * one_block > free:
        raise BadInput(
            f"{option} asks for {num_blocks} blocks of {one_block / MIB:.2f} MiB,"
            f" {num_blocks * one_block / MIB:.0f} MiB in all: {free / MIB:.0f} MiB are free on {device}"
        )
    return num_blocks

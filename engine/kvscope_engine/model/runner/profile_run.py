"""Measures the memory that the largest step needs in addition to weights and KV, by running one before blocks are
allocated.

The model's layers must already be fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvscope_engine.model.batch_invariance.fixed_tiles import GPU_TILE_TOKENS
from kvscope_engine.model.device_memory.device_memory import DeviceMemory
from kvscope_engine.model.layers.attention.no_attention import NoAttention
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.runner.step_memory import max_batched_tokens
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Peak bytes of a full step, in addition to the bytes allocated before it."""

    activations: int
    logits: int
    """Bytes of the LM head and of sampling, in addition to `activations`."""


def step_profile(config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory) -> StepProfile:
    """Run the largest step and return its peak memory. Raises KvscopeError if the step does not fit."""
    tokens = min(max_batched_tokens(config, loaded.device.type), loaded.max_model_len * config.max_num_seqs)
    samples = min(max(config.max_num_seqs, GPU_TILE_TOKENS if config.deterministic else 0), tokens)
    forward = Forward(loaded.module)
    ids = torch.zeros(tokens, dtype=torch.int64, device=loaded.device)
    positions = torch.arange(tokens, device=loaded.device) % loaded.max_model_len
    longest = loaded.max_model_len
    rows = torch.arange(samples, device=loaded.device)
    try:
        activations = _peak(memory, lambda: forward.fill(ids, positions, NoAttention(longest)))
        total = _peak(memory, lambda: _sample(forward.logits(ids, positions, NoAttention(longest), rows)))
    except torch.OutOfMemoryError as error:
        names = memory.holders.describe()
        raise KvscopeError(
            f"no memory for a step of {tokens} tokens on {loaded.device}{f' beside {names}' if names else ''}: give a"
            " smaller --max-num-batched-tokens"
        ) from error
    finally:
        memory.empty_cache()
    return StepProfile(activations, max(0, total - activations))


@torch.inference_mode()
def _peak(memory: DeviceMemory, run: Callable[[], object]) -> int:
    before = memory.held_bytes()
    memory.reset_peak()
    run()
    return memory.peak_bytes() - before


def _sample(logits: torch.Tensor) -> None:
    """Allocate as much memory as sampling does: float32 copies of the logits."""
    logits.float().softmax(-1).cumsum(-1)

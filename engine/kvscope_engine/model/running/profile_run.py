"""What the largest step needs beside weights and KV, found by running one on the GPU before blocks are allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.running.attention import AttentionOptions
from kvscope_engine.model.running.kv_storage import LayerShape
from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel

DEFAULT_BATCHED_TOKENS: Final = 8192
CUDA_GRAPH_BYTES: Final = 512 << 20
"""Kept for graphs and the kernels' own partial results, which the profile does not see."""


class _NoAttention:
    """A `PagedContext` without blocks: attention gives zeros."""

    def __init__(self) -> None:
        self.scratch: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def peak_workspace_bytes(config: EngineConfig, loaded: LoadedModel, layers: Sequence[LayerShape]) -> int:
    """Peak bytes of a full step over what is held before it, and what graphs will take.

    Raises KvscopeError when not even that step fits.
    """
    tokens = min(config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS, loaded.max_model_len * config.max_num_seqs)
    samples = min(config.max_num_seqs, tokens)
    device = loaded.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        _run(loaded, tokens, samples, layers)
    except torch.OutOfMemoryError as error:
        raise KvscopeError(
            f"no memory for a step of {tokens} tokens on {device}: give a smaller --max-num-batched-tokens"
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(peak) + CUDA_GRAPH_BYTES


@torch.inference_mode()
def _run(loaded: LoadedModel, tokens: int, samples: int, layers: Sequence[LayerShape]) -> None:
    """The forward and what sampling makes of its logits: float32 copies of them."""
    positions = torch.arange(tokens, device=loaded.device)[None] % loaded.max_model_len
    rows = torch.arange(samples, device=loaded.device)
    logits = loaded.module(
        input_ids=torch.zeros_like(positions),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=rows,
        paged=_NoAttention(),
    ).logits
    logits.float().softmax(-1).cumsum(-1)

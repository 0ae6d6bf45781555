"""Types of the answer of `kvscope-engine plan`: the GPU memory that a model's weights, KV cache and activations need.

The command prints the answer as JSON, and the desktop reads it. All sizes are bytes of one GPU, unless noted otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

WEIGHT_BYTES: Final = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes per parameter by weight type. In quantized models, embedding, output head and vectors keep 16 bits."""
KV_CACHE_DTYPES: Final = ("auto", "fp8", "int8")


MISSING: Final = "missing"
"""Name of the `PlanPart` for memory that the GPU would need in addition."""


class PlanPart(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    num_bytes: int
    how: str = ""
    """How the size was computed, or the source of the formula."""


def whole_of(parts: Sequence[PlanPart], gpu_bytes: int) -> int:
    """Return the denominator for the shares of `parts`: the GPU's memory, or the sum of all parts except `MISSING` if
    that is larger.
    """
    return max(gpu_bytes, sum(part.num_bytes for part in parts if part.name != MISSING))


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests with `num_tokens` tokens each that fit concurrently without sharing blocks."""

    num_tokens: int
    num_requests: int


class StageUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU of a pipeline stage."""

    number: int
    first_layer: int
    num_layers: int
    parts: tuple[PlanPart, ...]
    """Parts that add up to `InferenceAnswer.allowed_bytes`, including the KV cache. If the memory does not
    suffice, the last part is `MISSING`.
    """
    num_blocks: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A suggested change of one option with which more requests would fit, and its effect."""

    options: str
    num_tokens: int
    num_requests: int
    """Number of concurrent requests of the maximum length."""
    fits: bool
    note: str = ""


class InferenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    gpu_bytes: int
    allowed_bytes: int
    num_gpus: int
    fits: bool
    holds_longest: bool
    """Whether one request of `max_model_len` fits."""
    max_model_len: int
    block_size: int
    block_bytes: int
    """Bytes of one block on the GPU with the least free memory."""
    kv_bytes_a_token: float
    """KV bytes per token, summed over all GPUs."""
    num_blocks: int
    num_host_blocks: int
    num_tokens: int
    rooms: tuple[Headroom, ...]
    stages: tuple[StageUse, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    num_host_states: int = 0
    """Number of host-memory slots for recurrent states of swapped-out requests and prefixes, each of `host_state_bytes`
    bytes.
    """
    host_state_bytes: int = 0


class TrainingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    gpu_bytes: int
    fits: bool
    parts: tuple[PlanPart, ...]
    """Memory at the point of peak use. The parts add up to `peak_bytes`."""
    peak_bytes: int
    """Peak memory, including the CUDA context."""
    worst: str
    """Phase with the peak: "forward", "backward" or "optimizer"."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The complete plan. `training` is set only if it was requested."""

    model: str
    architecture: str
    num_parameters: int
    modules: tuple[tuple[str, int], ...]
    """Number of parameters by kind of module."""
    inference: InferenceAnswer
    training: TrainingAnswer | None = None
    is_first: bool = False
    """Whether this is a preliminary answer without suggested changes and training. The complete answer follows."""

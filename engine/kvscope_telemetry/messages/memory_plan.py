"""Types of data that `kvscope-engine plan` is asked for, and its answer: where a GPU's memory would go.

What the command prints as JSON and the desktop's page reads. All sizes are bytes of one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

WEIGHT_BYTES: Final = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""A parameter, by the types that are accepted. Embedding, head and vectors of quantized models keep 16 bits."""
KV_CACHE_DTYPES: Final = ("auto", "fp8", "int8")


MISSING: Final = "missing"
"""The part that is no part: what there is too little."""


class PlanPart(msgspec.Struct, frozen=True, kw_only=True):
    """A named piece of a sum."""

    name: str
    num_bytes: int
    how: str = ""
    """How it was reckoned, or where the formula is from."""


def whole_of(parts: Sequence[PlanPart], gpu_bytes: int) -> int:
    """What the shares of `parts` are of: a GPU's memory, or all of them where they are more."""
    return max(gpu_bytes, sum(part.num_bytes for part in parts if part.name != MISSING))


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a length fit at once, sharing nothing."""

    num_tokens: int
    num_requests: int


class StageUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a pipeline stage."""

    number: int
    first_layer: int
    num_layers: int
    parts: tuple[PlanPart, ...]
    """In all `allowed_bytes`, the KV cache included; the last may be `MISSING`."""
    num_blocks: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An option that would make more fit, and what it would give."""

    options: str
    num_tokens: int
    num_requests: int
    """Of the longest length."""
    fits: bool
    note: str = ""


class InferenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for serving."""

    gpu_bytes: int
    allowed_bytes: int
    num_gpus: int
    fits: bool
    holds_longest: bool
    """Whether one request of `max_model_len` fits."""
    max_model_len: int
    block_size: int
    block_bytes: int
    """Of one block on the tightest GPU."""
    kv_bytes_a_token: float
    """On all GPUs together."""
    num_blocks: int
    num_host_blocks: int
    num_tokens: int
    rooms: tuple[Headroom, ...]
    stages: tuple[StageUse, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    num_host_states: int = 0
    """Of recurrent layers: slots in host memory, for requests swapped out and prefixes, and their bytes."""
    host_state_bytes: int = 0


class TrainingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for training."""

    gpu_bytes: int
    fits: bool
    parts: tuple[PlanPart, ...]
    """What is held at the worst moment; in all `peak_bytes`."""
    peak_bytes: int
    """The context included."""
    worst: str
    """"forward", "backward" or "optimizer": when most is held."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole plan; `training` is there only when asked for."""

    model: str
    architecture: str
    num_parameters: int
    modules: tuple[tuple[str, int], ...]
    """Parameters of each kind of module."""
    inference: InferenceAnswer
    training: TrainingAnswer | None = None
    is_first: bool = False
    """Where the memory goes is said; what to change, and training, follow in a further answer."""

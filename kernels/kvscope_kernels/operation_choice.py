"""Which implementation an operation runs on, and why: a row of the table that `kvscope-engine doctor` prints."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch

TRITON: Final = "Triton"
C: Final = "C"
TORCH: Final = "torch"


@dataclass(frozen=True, slots=True)
class OperationChoice:
    """The implementation of one operation."""

    operation: str
    implementation: str
    reason: str
    """Why this one was taken, or why a faster one was not."""


class Operands(NamedTuple):
    """What a model gives its operations, as far as it decides who computes them."""

    dtype: torch.dtype
    """Type of activations."""
    cache_dtype: torch.dtype
    """Type of the KV cache."""
    head_dim: int
    """Numbers in a key of one head."""
    value_dim: int
    """Numbers in a value of one head."""


@runtime_checkable
class NamedImplementation(Protocol):
    """An operation that was put into `dispatch.Ops` at load and says itself who computes it."""

    @property
    def implementation(self) -> str:
        """Name and version of the library."""
        ...

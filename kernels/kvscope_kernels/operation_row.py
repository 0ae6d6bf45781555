"""Implementation of an operation, and the reason for it: a row of the table printed by `kvscope-engine doctor`."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch

TRITON: Final = "Triton"
C: Final = "C"
TORCH: Final = "torch"


@dataclass(frozen=True, slots=True)
class OperationChoice:
    operation: str
    implementation: str
    reason: str
    """Why this implementation was chosen, or why a faster one was not."""


class Operands(NamedTuple):
    """Properties of a model's operands that determine the implementation."""

    dtype: torch.dtype
    """Dtype of activations."""
    cache_dtype: torch.dtype
    head_dim: int
    """Key dimension of one head."""
    value_dim: int
    """Value dimension of one head."""


@runtime_checkable
class NamedImplementation(Protocol):
    """An operation in `dispatch.Ops`, chosen at load, with the name of its implementation."""

    @property
    def implementation(self) -> str:
        """Name and version of the library."""
        ...

"""Implementation of an operation, and the reason for it, as shown in the table of `kvscope-engine doctor`."""

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
    """Dtypes and head sizes of a model that determine the implementation of an operation."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    """Dimension of a key vector of one head."""
    value_dim: int


@runtime_checkable
class NamedImplementation(Protocol):
    """An operation in `dispatch.Ops` that is implemented by a library chosen at load, and knows the library's name."""

    @property
    def implementation(self) -> str:
        """Name and version of the library."""
        ...

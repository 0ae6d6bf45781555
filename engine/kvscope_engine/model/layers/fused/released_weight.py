"""Stands in for a weight that is kept in another layout: has its shape and dtype, but no numbers."""

from __future__ import annotations

from typing import Any

import torch


class WeightReleased(RuntimeError):
    """Somebody read a weight that is no longer there."""


class ReleasedWeight(torch.Tensor):
    """Looks like the weight for those who only look. Raises WeightGivenUp for any operation on it."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> ReleasedWeight:
        made: ReleasedWeight = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GivenUpWeight({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise WeightReleased(f"{func} reads a weight that is packed: only its layer's forward can use it")

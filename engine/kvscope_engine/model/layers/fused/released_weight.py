"""Placeholder for a weight that is stored in another layout, with the weight's shape and dtype but no data."""

from __future__ import annotations

from typing import Any

import torch


class WeightReleased(RuntimeError):
    """Raised when code reads a weight whose data was released."""


class ReleasedWeight(torch.Tensor):
    """Tensor with the shape, dtype and device of the weight. Any operation on it raises WeightReleased."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> ReleasedWeight:
        placeholder: ReleasedWeight = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReleasedWeight({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise WeightReleased(f"{func} reads a weight that is packed: only its layer's forward can use it")

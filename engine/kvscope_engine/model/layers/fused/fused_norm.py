"""RMSNorm as one device operation, computed in float32 for any dtype of the input. Recognizes norm modules.

Source: Zhang and Sennrich, Root mean square layer normalization, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from kvscope_kernels import ops_for


class LinearWithAdd(Protocol):
    """Linear layer that can add a tensor to its result; implemented by `packed_linear.FastLinear` and others."""

    @property
    def fuses_add(self) -> bool:
        """Whether `forward_add` adds inside the kernel that computes the matmul, at no extra cost."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor: ...


class FastRMSNorm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last axis, with a result of dtype `dtype`."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.detach().float()
        self.eps = torch.tensor(eps, device=weight.device)
        self.dtype = dtype
        self._ops = ops_for(weight.device.type)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps, self.dtype)

    def add_norm(
        self, x: torch.Tensor, linear: LinearWithAdd, linear_input: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum x + linear(linear_input), (T, size) in the dtype of x, and the norm of this sum."""
        if linear.fuses_add:
            total = linear.forward_add(linear_input, x)
            return total, self(total)
        return self._ops.add_rms_norm(x, linear(linear_input), self.weight, self.eps, self.dtype)


def norm_candidates(module: nn.Module) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return the two functions that an RMSNorm module may compute: normalization scaled by the weight, and by 1 +
    weight (Gemma).

    The list is empty if `module` cannot be an RMSNorm.
    """
    weight, eps = getattr(module, "weight", None), norm_eps(module)
    only_weight = [name for name, _ in module.named_parameters()] == ["weight"]
    if not only_weight or eps is None or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return []
    wide, dtype = weight.detach().float(), weight.dtype
    return [FastRMSNorm(wide, eps, dtype), FastRMSNorm(1.0 + wide, eps, dtype)]


def norm_eps(module: nn.Module) -> float | None:
    """Return the epsilon of an RMSNorm; None if `module` has no attribute that is usually called so."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None

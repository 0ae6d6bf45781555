"""RMSNorm as one operation of the device's, in float32 whatever the type of its input.

Owns what a norm holds and the recognition of a norm module by it. Source: Zhang and Sennrich, Root mean square layer
normalization, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from kvscope_kernels import ops_for


class AddingLinear(Protocol):
    """See `packed_linear.FastLinear`."""

    @property
    def adds_as_it_multiplies(self) -> bool:
        """Whether the sum costs nothing beside the product."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product and `other`, of the type of that."""


class FastRMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    The result is of type `dtype`, whatever the type of x is.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.detach().float()
        self.eps = torch.tensor(eps, device=weight.device)
        self.dtype = dtype
        self._ops = ops_for(weight.device.type)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same shape."""
        return self._ops.rms_norm(x, self.weight, self.eps, self.dtype)

    def of_sum(self, x: torch.Tensor, linear: AddingLinear, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + linear(given), (T, size) of the type of x, and its norm."""
        if linear.adds_as_it_multiplies:
            total = linear.forward_add(given, x)
            return total, self(total)
        return self._ops.add_rms_norm(x, linear(given), self.weight, self.eps, self.dtype)


def norm_candidates(module: nn.Module) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What `module` may be, if it is an RMSNorm: with its weight, or with one plus its weight (Gemma)."""
    weight, eps = getattr(module, "weight", None), norm_eps(module)
    only_weight = [name for name, _ in module.named_parameters()] == ["weight"]
    if not only_weight or eps is None or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return []
    wide, dtype = weight.detach().float(), weight.dtype
    return [FastRMSNorm(wide, eps, dtype), FastRMSNorm(1.0 + wide, eps, dtype)]


def norm_eps(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm under the names that are in use."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None

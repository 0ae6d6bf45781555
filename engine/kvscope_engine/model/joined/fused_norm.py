"""RMSNorm in few operations, in float32 whatever the type of its input.

Owns the arithmetic and the recognition of a norm module by what it holds. Source: Zhang and Sennrich, Root mean
square layer normalization, 2019.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class FastRMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the weight broadcasts over the axes before it.

    The result is of type `dtype`, whatever the type of x is.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.detach().float()
        self.eps = torch.tensor(eps, device=weight.device)
        self.inverse_size = 1.0 / weight.shape[-1]
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same shape."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, norm, norm, value=self.inverse_size).rsqrt_()
        normed = torch.mul(x, scale).mul_(self.weight)
        return normed.to(self.dtype)


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

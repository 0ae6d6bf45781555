"""Linear layers of a CPU on weights of 8 bits. Owns where they may be used, and the exchange once all else is proven.

Rounding changes the model, a little: nothing here is for `fuse` to prove. What stands in the exact model's place is
chosen by whoever loads it (`quantization`).
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.joined.float32_head import Float32Head
from kvscope_engine.model.joined.given_up_weight import GivenUpWeight
from kvscope_engine.model.joined.packed_linear import JoinedLinear
from kvscope_kernels.native.library import has_dot_product, library
from kvscope_kernels.native.linear import Int8Weight, int8_product_torch

_FEW_OUTPUTS: Final = 128
"""A layer that is this small is a router or a gate: it decides much and costs little."""
_DTYPES: Final = (torch.bfloat16, torch.float32)


class Int8Linear(nn.Module):
    """`x @ weight.T + bias` with the weight rounded to 8 bits and activations rounded on the way. Inference alone."""

    adds_as_it_multiplies: Final = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the result; None: that of the input."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = GivenUpWeight(weight)
        self.bias = bias
        self._dtype = dtype
        self._int8 = Int8Weight(weight.detach(), bias)
        for number, tensor in enumerate(self._int8.tensors):  # counted with the model's memory
            self.register_buffer(f"int8_{number}", tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self._int8.product(x, dtype=self._dtype)

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, plus `other` of the result's shape, in its type."""
        return self._int8.product(x, other)


@cache
def can_round() -> bool:
    """Whether this machine multiplies 8-bit weights: a small product is compared with the exact one first."""
    if library() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 70, generator=generator), torch.randn(100, 70, generator=generator)
    expected = int8_product_torch(x, weight)
    error = Int8Weight(weight).product(x).double() - expected  # a tie may be rounded either way
    return bool(error.norm() <= 1e-2 * expected.norm())


def is_fast() -> bool:
    """Whether it does so in the CPU's own instructions. Asked of the CPU, not of a clock: a model gives the same
    tokens at each start."""
    return can_round() and has_dot_product()


def round_linears(module: nn.Module, called: Container[nn.Module]) -> int:
    """Exchange each linear layer of `module` for one of 8 bits, one after the other; how many there were.

    Joined ones, those among `called`, and the head, whose results become float32.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            rounded = _rounded(child, called)
            if rounded is not None:
                setattr(parent, name, rounded)
                count += 1
    return count


def _rounded(child: Any, called: Container[nn.Module]) -> Int8Linear | None:
    if isinstance(child, Float32Head):
        return Int8Linear(child.weight, child.bias, torch.float32)
    is_plain = type(child) is nn.Linear and child in called and child.out_features > _FEW_OUTPUTS
    if not (is_plain or isinstance(child, JoinedLinear)) or child.weight.dtype not in _DTYPES:
        return None
    return Int8Linear(child.weight, child.bias)

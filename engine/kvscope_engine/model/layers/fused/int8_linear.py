"""Linear layers on weights rounded to 8 bits, for CPUs, and a test whether a CPU supports them."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import nn

from kvscope_engine.model.layers.fused.released_weight import ReleasedWeight
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.linear import Int8Weight, int8_product_torch
from kvscope_kernels.cpu.weight_buffer import WeightBuffer


class Int8Linear(nn.Module):
    """Linear layer `x @ weight.T + bias` with the weight rounded to 8 bits and activations rounded on the fly.
    Inference only.
    """

    fuses_add: Final = True
    bits: Final = 8

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        buffer: WeightBuffer | None = None,
    ) -> None:
        """Round the weight.

        Args:
            dtype: Dtype of the result; None for the dtype of the input.
            buffer: Allocator that the layers of a model share for their rounded weights.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = ReleasedWeight(weight)
        self.bias = bias
        self._dtype = dtype
        self.weight_of_8_bits = Int8Weight(weight.detach(), bias, buffer)
        for number, tensor in enumerate(self.weight_of_8_bits.tensors):  # counted with the model's memory
            self.register_buffer(f"int8_{number}", tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight_of_8_bits.product(x, dtype=self._dtype)

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return `forward(x) + other`, in the dtype of `other`, which has the result's shape."""
        return self.weight_of_8_bits.product(x, other)


@cache
def can_round() -> bool:
    """Whether this machine can multiply 8-bit weights, tested by comparing a small matmul with the exact result."""
    if library() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 70, generator=generator), torch.randn(100, 70, generator=generator)
    expected = int8_product_torch(x, weight)
    error = Int8Weight(weight).product(x).double() - expected  # a tie may be rounded either way
    return bool(error.norm() <= 1e-2 * expected.norm())

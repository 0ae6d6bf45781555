"""Products with grouped weights of 4 and 8 bits: on a GPU widened in registers, on any device by torch.

Owns which implementation a device gets (`grouped_product`), and torch's.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.operation_choice import TORCH, TRITON, C
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight
from kvscope_kernels.quantized_linear.triton_product import TritonGrouped, check_product


class GroupedProduct(Protocol):
    """A weight as one device reads it, and the product with it."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept in memory."""

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., inputs) to (..., outputs) of `dtype`, or of `add`, which is added, or of x."""


def grouped_product(
    weight: GroupedWeight,
    bias: Tensor | None,
    device: torch.device,
    room: WeightBuffer | None = None,
    *,
    rounds_activations: bool = False,
) -> GroupedProduct:
    """Triton's on a GPU, the compiled one on a CPU, in `room`, and torch's where nothing can be compiled. The compiled
    one alone may round activations to 8 bits."""
    implementation = grouped_implementation(device.type)
    if implementation == TRITON:
        return TritonGrouped(weight, bias, device)
    if implementation == TORCH:
        return TorchGrouped(weight, bias)
    return NativeGrouped(weight, bias, room, rounds_activations=rounds_activations)


def grouped_implementation(device_type: str) -> str:
    """Return which implementation multiplies grouped weights on a device: `TRITON`, `C` or `TORCH`."""
    if device_type == "cuda":
        return TRITON
    return TORCH if library() is None else C


class TorchGrouped:
    """Reference of `TritonGrouped`, for any device: the weight is widened for each product. Small, but slow."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.detach().float()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept in memory."""
        held = (self._weight.codes, *self._weight.facts)
        return held if self._bias is None else (*held, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., inputs) to (..., outputs) of `dtype`, or of `add`, which is added, or of x. Raises ValueError."""
        weight = self._weight
        check_product(x, add, (weight.codes.shape[0], weight.codes.shape[1]))
        sums = linear(x.float(), weight.widened().to(x.dtype).float(), self._bias)
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        return (sums if add is None else sums + add.float()).to(out_dtype)

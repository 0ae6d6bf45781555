"""Linear layers with grouped weights of 4 and 8 bits: choice of the implementation by device, and the torch
reference.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.operation_row import TORCH, TRITON, C
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight
from kvscope_kernels.quantized_linear.triton_product import TritonGrouped, check_product


class GroupedProduct(Protocol):
    """A grouped weight in the memory layout of one device, with its matmul."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias + `add`, (..., inputs) -> (..., outputs). The result has `dtype` if given,
        otherwise the dtype of `add` if given, otherwise that of x.
        """


def grouped_product(
    weight: GroupedWeight,
    bias: Tensor | None,
    device: torch.device,
    buffer: WeightBuffer | None = None,
    *,
    rounds_activations: bool = False,
) -> GroupedProduct:
    """Pack a weight whose groups of inputs have a scale and an offset each, for fast matmuls on `device`.

    The implementation uses Triton on a GPU, and C on a CPU, where the packed weight is allocated from `buffer` if
    given. On a CPU without a compiled C library, it uses torch and does not pack the weight. Only the C implementation
    can round activations to 8 bits.
    """
    implementation = grouped_implementation(device.type)
    if implementation == TRITON:
        return TritonGrouped(weight, bias, device)
    if implementation == TORCH:
        return TorchGrouped(weight, bias)
    return NativeGrouped(weight, bias, buffer, rounds_activations=rounds_activations)


def grouped_implementation(device_type: str) -> str:
    """Return the implementation of matmuls with grouped weights on a device: `TRITON`, `C` or `TORCH`."""
    if device_type == "cuda":
        return TRITON
    return TORCH if library() is None else C


class TorchGrouped:
    """Reference of `TritonGrouped` for any device. Slow, because it dequantizes the weight for each matmul."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.detach().float()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        weight_tensors = (self._weight.codes, *self._weight.scale_and_low)
        return weight_tensors if self._bias is None else (*weight_tensors, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias + `add`, (..., inputs) -> (..., outputs). The result has `dtype` if given,
        otherwise the dtype of `add` if given, otherwise that of x.

        Raises ValueError for unsupported arguments.
        """
        weight = self._weight
        check_product(x, add, (weight.codes.shape[0], weight.codes.shape[1]))
        sums = linear(x.float(), weight.widened().to(x.dtype).float(), self._bias)
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        return (sums if add is None else sums + add.float()).to(out_dtype)

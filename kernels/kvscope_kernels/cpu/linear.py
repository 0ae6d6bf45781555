"""Linear layers with 8-bit weights on a CPU, from linear.c. Decides how a weight is rounded, and defines its
memory layout.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.checks import require
from kvscope_kernels.cpu.library import LinearStruct, library
from kvscope_kernels.cpu.product import NativeProduct
from kvscope_kernels.cpu.weight_buffer import WeightBuffer

PANEL = 64
"""Number of output rows that are interleaved in the weight layout."""
GROUP = 64
"""Number of inputs of a weight that share a scale."""
_PANELS_PER_PART = 32
_TINY = 1e-30


class Int8Weight(NativeProduct):
    """Weight (outputs, inputs) rounded to 8 bits with a scale per GROUP inputs, with its matmul.

    A scale is the largest absolute value of its group over 127. Raises RuntimeError without a compiled library
    (`library`), and ValueError for a weight that is not two-dimensional, is empty or is not finite.
    """

    function = "kvscope_linear"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, buffer: WeightBuffer | None = None) -> None:
        """Round and pack `weight`, in memory from `buffer` if given, which is shared with other weights."""
        native = library()
        if native is None:
            raise RuntimeError("weights of 8 bits need a C compiler on a Linux machine (cc, gcc or clang)")
        require(weight.dim() == 2 and weight.numel() > 0, "weight", weight, "(outputs, inputs), neither of them 0,")
        self.outputs, self.inputs = weight.shape
        self._packed, self._scale = _packed(weight, buffer)
        self._bias = None if bias is None else _padded(bias.detach().float(), len(self._packed) * PANEL)
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        groups = self._packed.shape[1]
        parts = (self._packed.data_ptr(), self._scale.data_ptr(), bias_pointer, self.outputs, self.inputs, groups)
        self._set_weight(native, LinearStruct(*parts), self._packed, self._scale, self._bias)


def int8_product_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Return the result of `Int8Weight.product`, computed in float64 from activations and weights rounded to 8 bits."""
    return _rounded(x) @ _rounded(weight).T


def _rounded(rows: Tensor) -> Tensor:
    groups = _in_groups(rows).double()
    scale = groups.abs().amax(-1, keepdim=True) / 127.0
    return ((groups / scale.clamp_min(_TINY)).round() * scale).flatten(-2)[..., : rows.shape[-1]]


def _in_groups(rows: Tensor) -> Tensor:
    """Reshape (..., inputs) to (..., groups, GROUP) float32, padded with zeros."""
    wide = pad(rows.float(), (0, -rows.shape[-1] % GROUP))
    return wide.view(*rows.shape[:-1], wide.shape[-1] // GROUP, GROUP)


def _packed(weight: Tensor, buffer: WeightBuffer | None) -> tuple[Tensor, Tensor]:
    """Return [panels, groups, GROUP / 4, PANEL, 4] uint8 with 128 added, and scales [panels, groups, PANEL].

    Processes some rows of the weight at a time, so that a large weight is not converted to float32 as a whole.
    """
    panels, groups = -(-len(weight) // PANEL), -(-weight.shape[1] // GROUP)
    allocate = torch.empty if buffer is None else buffer.allocate
    packed = allocate((panels, groups, GROUP // 4, PANEL, 4), dtype=torch.uint8)
    scales = allocate((panels, groups, PANEL), dtype=torch.float32)
    for first in range(0, panels, _PANELS_PER_PART):
        rows = weight[first * PANEL : (first + _PANELS_PER_PART) * PANEL].detach()
        parts = _in_groups(pad(rows, (0, 0, 0, -len(rows) % PANEL))).view(-1, PANEL, groups, GROUP)
        scale = parts.abs().amax(-1) / 127.0  # (some, PANEL, groups)
        if not bool(torch.isfinite(scale).all()):
            require(False, "weight", weight, "finite numbers")
        codes = (parts / scale.clamp_min(_TINY)[..., None]).round_().add_(128.0).to(torch.uint8)
        panel_range = slice(first, first + len(parts))
        packed[panel_range] = codes.view(-1, PANEL, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        scales[panel_range] = scale.transpose(1, 2)
    return packed, scales


def _padded(bias: Tensor, length: int) -> Tensor:
    out = torch.zeros(length)
    out[: len(bias)] = bias
    return out


assert ctypes.sizeof(LinearStruct) == 48, "as linear.c has it"

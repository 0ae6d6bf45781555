"""Products with weights of 8 bits on a CPU, from linear.c. Owns how a weight is rounded and laid out."""

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.native.library import LinearParts, library

PANEL = 64
"""Outputs side by side in the layout."""
_X_F32, _OUT_F32, _ADD_F32 = 1, 2, 4
_DTYPES = (torch.bfloat16, torch.float32)
_MAX_INPUTS = 1 << 15
"""Sums of 8-bit products of that many stay within 32 bits."""


class Int8Weight:
    """A weight (outputs, inputs) rounded to 8 bits with a scale for each output, and the product with it.

    scale[n] = max|weight[n]| / 127. Raises RuntimeError where there is no compiled library (`library`), ValueError for
    a weight that is not two-dimensional, is too wide or is not finite.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        found = library()
        if found is None:
            raise RuntimeError("weights of 8 bits need a C compiler on a Linux machine (cc, gcc or clang)")
        require(weight.dim() == 2 and 0 < weight.shape[1] <= _MAX_INPUTS, "weight", weight, "(outputs, inputs <= 32768)")
        self.outputs, self.inputs = weight.shape
        self._packed, self._scale = _packed(weight)
        self._bias = None if bias is None else _padded(bias.detach().float(), len(self._scale))
        self._call = found.kvscope_linear
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        padded = self._packed.shape[1] * 4
        parts = (self._packed.data_ptr(), self._scale.data_ptr(), bias_pointer, self.outputs, self.inputs, padded)
        self._parts = LinearParts(*parts)
        self._address = addressof(self._parts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept in memory."""
        return (self._packed, self._scale) if self._bias is None else (self._packed, self._scale, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., inputs), bfloat16 or float32, to (..., outputs) of `dtype`, or of `add`, or of x.

        add  (..., outputs), bfloat16 or float32: added before the result is rounded to its type
        """
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        if x.shape[-1] != self.inputs or x.dtype not in _DTYPES or out_dtype not in _DTYPES:
            require(False, "x", x, f"(..., {self.inputs}) bfloat16 or float32")
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=out_dtype)
        flags = _X_F32 * (x.dtype == torch.float32) + _OUT_F32 * (out_dtype == torch.float32)
        pointer = None
        if add is not None:
            if add.shape != out.shape or add.dtype not in _DTYPES:
                require(False, "add", add, f"{tuple(out.shape)} bfloat16 or float32")
            add = add.contiguous()
            flags += _ADD_F32 * (add.dtype == torch.float32)
            pointer = add.data_ptr()
        count = x.numel() // self.inputs
        if self._call(self._address, x.data_ptr(), count, out.data_ptr(), pointer, flags, torch.get_num_threads()):
            raise MemoryError("no memory for a product's rounded activations")
        return out


def int8_product_torch(x: Tensor, weight: Tensor) -> Tensor:
    """What `Int8Weight.product` computes, in float64: both sides rounded to 8 bits, a row each."""
    (w, w_scale), (a, a_scale) = _rounded(weight), _rounded(x)
    return (a @ w.T) * a_scale * w_scale.T


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.double().abs().amax(-1, keepdim=True) / 127.0
    return (rows.double() / scale.clamp_min(1e-300)).round(), scale


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs / 64, inputs / 4, 64, 4] uint8 with 128 added, and the scales, padded to whole panels.

    A part at a time: a large embedding is not made float32 at once.
    """
    outputs, inputs = weight.shape
    panels, quads = -(-outputs // PANEL), -(-inputs // 4)
    packed = torch.full((panels, quads, PANEL, 4), 128, dtype=torch.uint8)
    scales = torch.zeros(panels * PANEL)
    for panel in range(0, panels, 32):
        rows = weight[panel * PANEL : (panel + 32) * PANEL].detach().float()
        scale = rows.abs().amax(1) / 127.0
        if not bool(torch.isfinite(scale).all()):
            require(False, "weight", weight, "finite numbers")
        whole = torch.full((-(-len(rows) // PANEL) * PANEL, quads * 4), 128.0)
        whole[: len(rows), :inputs] = (rows / scale.clamp_min(1e-30)[:, None]).round_().add_(128.0)
        parts = whole.to(torch.uint8).view(-1, PANEL, quads, 4).transpose(1, 2)
        packed[panel : panel + len(parts)] = parts
        scales[panel * PANEL : panel * PANEL + len(rows)] = scale
    return packed.view(panels, quads, PANEL * 4).view(panels, -1, PANEL, 4), scales


def _padded(bias: Tensor, length: int) -> Tensor:
    out = torch.zeros(length)
    out[: len(bias)] = bias
    return out


assert ctypes.sizeof(LinearParts) == 48, "as linear.c has it"

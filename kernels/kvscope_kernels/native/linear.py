"""Products with weights of 8 bits on a CPU, from linear.c. Owns how a weight is rounded and laid out."""

import ctypes
from ctypes import addressof

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.checks import require
from kvscope_kernels.native.library import LinearParts, library

PANEL = 64
"""Outputs side by side in the layout."""
GROUP = 64
"""Inputs that share a scale."""
_PANELS_AT_ONCE = 32
_TINY = 1e-30
_X_F32, _OUT_F32, _ADD_F32 = 1, 2, 4
_DTYPES = (torch.bfloat16, torch.float32)


class Int8Weight:
    """A weight (outputs, inputs) rounded to 8 bits with a scale for each GROUP inputs, and the product with it.

    A scale is the largest of its group, as a size, over 127. Raises RuntimeError where there is no compiled library
    (`library`), ValueError for a weight that is not two-dimensional, is empty or is not finite.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        found = library()
        if found is None:
            raise RuntimeError("weights of 8 bits need a C compiler on a Linux machine (cc, gcc or clang)")
        require(weight.dim() == 2 and weight.numel() > 0, "weight", weight, "(outputs, inputs), neither of them 0,")
        self.outputs, self.inputs = weight.shape
        self._packed, self._scale = _packed(weight)
        self._bias = None if bias is None else _padded(bias.detach().float(), len(self._packed) * PANEL)
        self._call = found.kvscope_linear
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        groups = self._packed.shape[1]
        parts = (self._packed.data_ptr(), self._scale.data_ptr(), bias_pointer, self.outputs, self.inputs, groups)
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
    """What `Int8Weight.product` computes, in float64: both sides rounded to 8 bits, GROUP inputs of a row at a time."""
    return _rounded(x) @ _rounded(weight).T


def _rounded(rows: Tensor) -> Tensor:
    groups = _in_groups(rows).double()
    scale = groups.abs().amax(-1, keepdim=True) / 127.0
    return ((groups / scale.clamp_min(_TINY)).round() * scale).flatten(-2)[..., : rows.shape[-1]]


def _in_groups(rows: Tensor) -> Tensor:
    """(..., inputs) to (..., groups, GROUP) float32, with zeros behind."""
    wide = pad(rows.float(), (0, -rows.shape[-1] % GROUP))
    return wide.view(*rows.shape[:-1], wide.shape[-1] // GROUP, GROUP)


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[panels, groups, GROUP / 4, PANEL, 4] uint8 with 128 added, and scales [panels, groups, PANEL]; a part of the
    weight at a time, so that a large one is not made float32 at once."""
    panels, groups = -(-len(weight) // PANEL), -(-weight.shape[1] // GROUP)
    packed = torch.empty((panels, groups, GROUP // 4, PANEL, 4), dtype=torch.uint8)
    scales = torch.empty((panels, groups, PANEL))
    for first in range(0, panels, _PANELS_AT_ONCE):
        rows = weight[first * PANEL : (first + _PANELS_AT_ONCE) * PANEL].detach()
        parts = _in_groups(pad(rows, (0, 0, 0, -len(rows) % PANEL))).view(-1, PANEL, groups, GROUP)
        scale = parts.abs().amax(-1) / 127.0  # (some, PANEL, groups)
        if not bool(torch.isfinite(scale).all()):
            require(False, "weight", weight, "finite numbers")
        whole = (parts / scale.clamp_min(_TINY)[..., None]).round_().add_(128.0).to(torch.uint8)
        here = slice(first, first + len(parts))
        packed[here] = whole.view(-1, PANEL, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        scales[here] = scale.transpose(1, 2)
    return packed, scales


def _padded(bias: Tensor, length: int) -> Tensor:
    out = torch.zeros(length)
    out[: len(bias)] = bias
    return out


assert ctypes.sizeof(LinearParts) == 48, "as linear.c has it"

"""Products with grouped weights of 4 and 8 bits: on a GPU widened in registers, on any device by torch.

Owns the layout the kernel reads, and which implementation a device gets (`grouped_product`).
"""

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.grouped.weight import CHUNK, GroupedWeight
from kvscope_kernels.native.grouped import NativeGrouped
from kvscope_kernels.native.library import library
from kvscope_kernels.native.weight_buffer import WeightBuffer
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit_varying, require_triton, tl

_BYTES: Final = CHUNK // 2
_FEW_ROWS: Final = 16
"""A decode's; more of them are more arithmetic a weight, and larger tiles."""
_CHUNK = tl.constexpr(CHUNK)
_CHUNK_BYTES = tl.constexpr(_BYTES)


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
    if device.type == "cuda":
        return TritonGrouped(weight, bias, device)
    if library() is None:
        return TorchGrouped(weight, bias)
    return NativeGrouped(weight, bias, room, rounds_activations=rounds_activations)


class TritonGrouped:
    """x @ weight.T with the weight widened to the type of x in registers; sums in float32."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> None:
        self.outputs, self.inputs = weight.codes.shape
        self._bits, self._group = weight.bits, weight.group
        self._codes = (_packed(weight.codes) if weight.bits == 4 else weight.codes.contiguous()).to(device)
        self._scale, self._low = (facts.contiguous().to(device) for facts in weight.facts)
        self._bias = None if bias is None else bias.detach().float().to(device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept in memory."""
        return tuple(x for x in (self._codes, self._scale, self._low, self._bias) if x is not None)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x (..., inputs) to (..., outputs) of `dtype`, or of `add`, which is added, or of x. Raises ValueError."""
        _check(x, add, (self.outputs, self.inputs))
        require_triton()
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=out_dtype, device=x.device)
        rows = x.numel() // self.inputs
        if not rows:
            return out
        constants = product_constants(self.outputs, self.inputs, self._group, rows, self._bits)
        grid = (cdiv(self.outputs, constants["TILE_N"]), cdiv(rows, constants["TILE_M"]))
        tensors = (x.contiguous(), *self.tensors[:3], self._bias, None if add is None else add.contiguous(), out)
        _grouped_product_kernel[grid](*tensors, rows, **constants, UPCAST_DOT=is_interpreting())
        return out


def product_constants(outputs: int, inputs: int, group: int, rows: int, bits: int = 4) -> dict[str, int]:
    """The kernel's constants that follow from the weight and the number of rows, and its warps."""
    is_few = rows <= _FEW_ROWS
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "GROUP": group,
        "BITS": bits,
        "TILE_M": 16 if is_few else 64,
        "TILE_N": 32 if is_few else 64,
        "TILE_CHUNKS": 4 if is_few else 2,
        "num_warps": 4,
    }


@jit_varying(numbers=("num_rows",))
def _grouped_product_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    bias: tl.tensor,
    add: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program: TILE_M rows by TILE_N outputs. Of 4 bits, a byte holds input k of a chunk in its low ones, k + 16 in
    its high ones, so that each half of a tile of bytes is a tile of weights, with every second run of 16 inputs of x.
    Of 8 bits, a byte is an input."""
    num_groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    row_bytes: tl.constexpr = (INPUTS + _CHUNK - 1) // _CHUNK * _CHUNK_BYTES if BITS == 4 else INPUTS
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    in_n, in_m = n < OUTPUTS, m < num_rows
    x_rows, code_rows = x + m * INPUTS, codes + n.to(tl.int64) * row_bytes
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, row_bytes, TILE_CHUNKS * _CHUNK_BYTES):
        at = start + tl.arange(0, TILE_CHUNKS * _CHUNK_BYTES)
        inside = in_n[:, None] & (at < row_bytes)[None, :]
        both = tl.load(code_rows[:, None] + at[None, :], mask=inside, other=0)
        k = at // _CHUNK_BYTES * _CHUNK + at % _CHUNK_BYTES if BITS == 4 else at
        facts = n[:, None] * num_groups + (k // GROUP)[None, :]
        factor = tl.load(scale + facts, mask=inside, other=0.0).to(tl.float32)
        lowest = tl.load(low + facts, mask=inside, other=0.0).to(tl.float32)
        codes_first = both & 15 if BITS == 4 else both
        first = (codes_first.to(tl.float32) * factor + lowest).to(x.dtype.element_ty)
        in_first = in_m[:, None] & (k < INPUTS)[None, :]
        x_first = tl.load(x_rows[:, None] + k[None, :], mask=in_first, other=0.0)
        if UPCAST_DOT:
            first, x_first = first.to(tl.float32), x_first.to(tl.float32)
        sums = tl.dot(x_first, tl.trans(first), sums, input_precision="ieee")
        if BITS == 4:
            second = ((both >> 4).to(tl.float32) * factor + lowest).to(x.dtype.element_ty)
            in_second = in_m[:, None] & (k + _CHUNK_BYTES < INPUTS)[None, :]
            x_second = tl.load(x_rows[:, None] + (k + _CHUNK_BYTES)[None, :], mask=in_second, other=0.0)
            if UPCAST_DOT:
                second, x_second = second.to(tl.float32), x_second.to(tl.float32)
            sums = tl.dot(x_second, tl.trans(second), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=in_n, other=0.0)[None, :]
    places = m[:, None] * OUTPUTS + n[None, :]
    in_out = in_m[:, None] & in_n[None, :]
    if add is not None:
        sums += tl.load(add + places, mask=in_out, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=in_out)


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
        _check(x, add, (weight.codes.shape[0], weight.codes.shape[1]))
        sums = linear(x.float(), weight.widened().to(x.dtype).float(), self._bias)
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        return (sums if add is None else sums + add.float()).to(out_dtype)


def _check(x: Tensor, add: Tensor | None, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    if x.dim() < 1 or x.shape[-1] != inputs or x.dtype not in FLOAT_DTYPES:
        require(False, "x", x, f"(..., {inputs}), floating,")
    if add is not None and (add.shape != (*x.shape[:-1], outputs) or add.dtype not in FLOAT_DTYPES):
        require(False, "add", add, f"{(*x.shape[:-1], outputs)}, floating,")


def _packed(codes: Tensor) -> Tensor:
    """(outputs, chunks * 16) uint8 of two codes each."""
    halves = pad(codes, (0, -codes.shape[1] % CHUNK)).view(len(codes), -1, 2, _BYTES)
    return torch.add(halves[:, :, 0], halves[:, :, 1] * 16).flatten(1).contiguous()

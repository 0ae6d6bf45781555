"""Linear layers on a GPU with grouped weights of 4 and 8 bits, dequantized in registers.

Defines the memory layout that the kernels read. Decides tiles, and the number of parts into which the inputs are split.

A thread loads 16 bytes at a time, a unit of 32 inputs of 4 bits or 16 inputs of 8 bits: input 4 * j + i of a unit is
number j of its 32-bit word i. A number becomes float32 by two bit operations: it is shifted into a mantissa whose
exponent makes it 2^n plus the number.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.launch import num_multiprocessors
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, GroupedWeight
from kvscope_kernels.triton_language import (
    add_product,
    cdiv,
    is_interpreting,
    jit,
    jit_varying,
    next_power_of_2,
    require_triton,
    tl,
)

_FEW_ROWS: Final = 16
_SOME_ROWS: Final = 64
_PROGRAMS_PER_MULTIPROCESSOR: Final = {1: 8, _FEW_ROWS: 4, _SOME_ROWS: 2}
"""Number of programs per multiprocessor that splitting the inputs may create, by the maximum number of rows.

Programs for one row are small and mostly wait for memory, so many can run at a time. With more rows, a few programs
occupy a multiprocessor.
"""
_WORDS_PER_UNIT: Final = 4
_SMALLEST_TILE: Final = 16
"""Minimum number of outputs per program."""


_CHUNK = tl.constexpr(CHUNK)
_E4M3_EXPONENT = tl.constexpr(120)
"""Difference of the exponent biases of float32 and e4m3."""


class ProductTiles(NamedTuple):
    """Tile of one program: TILE_M rows of x by TILE_N outputs, summed over TILE_U units of a weight row at a time."""

    tile_m: int
    tile_n: int
    tile_u: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


class TritonGrouped:
    """x @ weight.T with the weight dequantized to the dtype of x in registers; sums in float32.

    Only one stream at a time may use an instance: see `KernelWeight.num_finished`.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> None:
        self.outputs, self.inputs = weight.codes.shape
        self._bits, self._group = weight.bits, weight.group
        self._packed_words = _packed_words(weight.codes, weight.bits).to(device)
        self._scale, self._low = (tensor.contiguous().to(device) for tensor in weight.scale_and_low)
        self._num_finished = new_counters(self.outputs, device)
        self._bias = None if bias is None else bias.detach().float().to(device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        weight = (self._packed_words, self._scale, self._low, self._num_finished)
        return weight if self._bias is None else (*weight, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias + `add`, (..., inputs) -> (..., outputs). The result has `dtype` if given,
        otherwise the dtype of `add` if given, otherwise that of x.

        Raises ValueError for unsupported arguments.
        """
        check_product(x, add, (self.outputs, self.inputs))
        require_triton()
        kernel_weight = KernelWeight(
            self._packed_words, self._scale, self._low, self._num_finished, self._bits, self._group
        )
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=out_type(x, add, dtype), device=x.device)
        launch_product(x, kernel_weight, out, self._bias, add)
        return out


class KernelWeight(NamedTuple):
    """A weight in the memory layout of the kernel; `low` is None for e4m3."""

    words: Tensor
    scale: Tensor
    low: Tensor | None
    num_finished: Tensor
    """Counters of the programs of a launch that have finished; 0 between launches.

    Concurrent launches would count each other's programs, so all matmuls with a weight, and CUDA graphs of them, must
    run on one stream at a time.
    """
    bits: int
    group: int


def out_type(x: Tensor, add: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a matmul's result: `dtype` if given, else that of `add`, else of x."""
    return dtype or (x.dtype if add is None else add.dtype)


def new_counters(outputs: int, device: torch.device) -> Tensor:
    """Return zeroed counters for `KernelWeight.num_finished`."""
    return torch.zeros(cdiv(outputs, _SMALLEST_TILE), dtype=torch.int32, device=device)


def launch_product(
    x: Tensor,
    weight: KernelWeight,
    out: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    row_scale: Tensor | None = None,
) -> None:
    """Compute x @ weight.T into `out`, without synchronization, so that CUDA graphs can capture it.

    Only one stream at a time may use a weight: see `KernelWeight.num_finished`.
    """
    inputs, outputs = x.shape[-1], out.shape[-1]
    rows = x.numel() // inputs
    if not rows:
        return
    tiles = product_tiles(rows, weight.bits, x.element_size())
    splits = num_splits(rows, outputs, inputs, weight.bits, tiles, num_multiprocessors(x.device))
    grid = (cdiv(outputs, tiles.tile_n), cdiv(rows, tiles.tile_m), splits)
    num_sums = grid[0] * splits * tiles.tile_n * tiles.tile_m
    _grouped_product_kernel[grid](
        x.contiguous(),
        weight.words,
        weight.scale,
        weight.low,
        bias,
        None if add is None else add.contiguous(),
        out,
        torch.empty(num_sums, dtype=torch.float32, device=x.device) if splits > 1 else None,
        weight.num_finished,
        row_scale,
        rows,
        **product_constants(outputs, inputs, weight.group, weight.bits, tiles, splits),
        PLAIN=is_interpreting(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )


def product_tiles(rows: int, bits: int, element_bytes: int) -> ProductTiles:
    """Return the tiles. A single row of x is summed without matrix units. Tiles of more rows take at most 64
    KiB dequantized.
    """
    unit = 128 // bits
    if rows == 1:
        return ProductTiles(1, _SMALLEST_TILE, 32, 4, 1, max_registers=96)  # else some spill
    if element_bytes == 4:
        return ProductTiles(16, 32, 64 // unit, 4, 2)
    if rows <= _SOME_ROWS:
        return ProductTiles(max(16, next_power_of_2(rows)), 64, 128 // unit, 4, 3)
    return ProductTiles(128, 128, 64 // unit, 8, 3)


def num_splits(rows: int, outputs: int, inputs: int, bits: int, tiles: ProductTiles, multiprocessors: int) -> int:
    """Return the number of parts into which the inputs are split to fill a GPU. Each part is computed by one program
    per tile.

    No part is empty. If there are several rows, each part has at least two tiles.
    """
    programs_each = next((count for most, count in _PROGRAMS_PER_MULTIPROCESSOR.items() if rows <= most), 0)
    num_tiles = cdiv(inputs, tiles.tile_u * (128 // bits))
    most = num_tiles if rows == 1 else num_tiles // 2
    wanted = programs_each * multiprocessors // (cdiv(outputs, tiles.tile_n) * cdiv(rows, tiles.tile_m))
    splits = max(1, min(most, wanted)) if rows <= tiles.tile_m else 1
    return cdiv(num_tiles, cdiv(num_tiles, splits))


def product_constants(
    outputs: int, inputs: int, group: int, bits: int, tiles: ProductTiles, splits: int
) -> dict[str, int]:
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "GROUP": group,
        "BITS": bits,
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "TILE_U": tiles.tile_u,
        "SPLITS": splits,
    }


@jit_varying(numbers=("num_rows",))
def _grouped_product_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    bias: tl.tensor,
    add: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    num_finished: tl.tensor,
    row_scale: tl.tensor,
    num_rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_U: tl.constexpr,
    SPLITS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Each program computes TILE_N outputs of TILE_M rows, over one part of the inputs.

    The last program of a tile to finish adds up the results of all parts, in order, and resets the counter for the next
    launch. Without `low`, the words contain e4m3 numbers in order. With `row_scale`, rows of x are multiplied by it.
    """
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    part = tl.program_id(2)
    unit: tl.constexpr = 128 // BITS
    num_tiles: tl.constexpr = ((INPUTS + unit - 1) // unit + TILE_U - 1) // TILE_U
    tiles_per_part: tl.constexpr = (num_tiles + SPLITS - 1) // SPLITS
    first = part * tiles_per_part * TILE_U
    last = tl.minimum(first + tiles_per_part * TILE_U, num_tiles * TILE_U)
    if TILE_M == 1:
        row = _sum_one_row(x, words, scale, low, n, first, last, OUTPUTS, INPUTS, GROUP, BITS, TILE_N, TILE_U, PLAIN)
        total = row[:, None]
    else:
        total = tl.zeros([TILE_N, TILE_M], tl.float32)
        for u in range(first, last, TILE_U):
            units = u + tl.arange(0, TILE_U)
            tile = _widened(
                words, scale, low, n, units, x.dtype.element_ty, OUTPUTS, INPUTS, GROUP, BITS, TILE_N, TILE_U, PLAIN
            )
            k = u * unit + tl.arange(0, TILE_U * unit)
            inside = (m < num_rows)[:, None] & (k < INPUTS)[None, :]
            numbers = tl.load(x + m.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=inside, other=0.0)
            total = add_product(tile, numbers, total, PLAIN)
    if SPLITS > 1:
        sums_offset = tl.arange(0, TILE_N)[:, None] * TILE_M + tl.arange(0, TILE_M)[None, :]
        partial_sums = sums + tl.program_id(0).to(tl.int64) * (SPLITS * TILE_N * TILE_M) + sums_offset
        tl.store(partial_sums + part * (TILE_N * TILE_M), total)
        tl.debug_barrier()
        is_last = tl.atomic_add(num_finished + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros([TILE_N, TILE_M], tl.float32)
            for other in range(SPLITS):
                total += tl.load(partial_sums + other * (TILE_N * TILE_M), cache_modifier=".cg")
            tl.store(num_finished + tl.program_id(0), 0)
            _store(total, row_scale, bias, add, out, n, m, num_rows, OUTPUTS)
    else:
        _store(total, row_scale, bias, add, out, n, m, num_rows, OUTPUTS)


@jit
def _sum_one_row(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_U: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """Return TILE_N outputs for a single row of x. Scale and low are applied to a unit's sums of x * code, and of x."""
    unit: tl.constexpr = 128 // BITS
    word = tl.arange(0, 4)
    parts = tl.zeros([TILE_N, TILE_U], tl.float32)
    for u in range(first, last, TILE_U):
        units = u + tl.arange(0, TILE_U)
        weight, factor, groups, in_groups = _load_units(words, scale, n, units, OUTPUTS, INPUTS, GROUP, BITS)
        products = tl.zeros([TILE_N, TILE_U, 4], tl.float32)
        numbers = tl.zeros([TILE_U, 4], tl.float32)
        offsets = tl.zeros([TILE_U, 4], tl.float32)
        for shift in tl.static_range(4):
            if low is None:
                k = (units * unit)[:, None] + (shift + 4 * word)[None, :]
                each = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
                products += _e4m3(weight, shift) * 2.0**_E4M3_EXPONENT * each[None, :, :]
            else:
                shifted = _shift_byte(weight, shift)
                for half in tl.static_range(8 // BITS):
                    k = (units * unit)[:, None] + (4 * (8 // BITS * shift + half) + word)[None, :]
                    each = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
                    numbers += each
                    offsets += each * (16.0 if half else 256.0)
                    products += _code(shifted, half, BITS, PLAIN) * each[None, :, :]
        if low is None:
            parts += tl.sum(products, 2) * factor
        else:
            lowest = tl.load(low + groups, mask=in_groups, other=0.0).to(tl.float32)
            parts += (tl.sum(products, 2) - tl.sum(offsets, 1)[None, :]) * factor + tl.sum(numbers, 1)[None, :] * lowest
    return tl.sum(parts, 1)


@jit
def _widened(
    words: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    n: tl.tensor,
    units: tl.tensor,
    dtype: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_U: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """Return the dequantized weight, (TILE_N, inputs of TILE_U units).

    Each thread has complete units, so reordering their inputs is free.
    """
    unit: tl.constexpr = 128 // BITS
    weight, factor, groups, in_groups = _load_units(words, scale, n, units, OUTPUTS, INPUTS, GROUP, BITS)
    factor = factor[:, :, None]
    a, b = _shift_byte(weight, 0), _shift_byte(weight, 1)
    c, d = _shift_byte(weight, 2), _shift_byte(weight, 3)
    if low is None:
        power = factor * 2.0**_E4M3_EXPONENT
        ab = tl.join(_e4m3(weight, 0) * power, _e4m3(weight, 1) * power)
        cd = tl.join(_e4m3(weight, 2) * power, _e4m3(weight, 3) * power)
        wide = tl.permute(tl.join(ab, cd), (0, 1, 2, 4, 3))
    else:
        lowest = tl.load(low + groups, mask=in_groups, other=0.0).to(tl.float32)[:, :, None]
        below = lowest - 256.0 * factor
        if BITS == 4:
            near = lowest - 16.0 * factor
            a2 = tl.join(_code(a, 0, 4, PLAIN) * factor + below, _code(a, 1, 4, PLAIN) * factor + near)
            b2 = tl.join(_code(b, 0, 4, PLAIN) * factor + below, _code(b, 1, 4, PLAIN) * factor + near)
            c2 = tl.join(_code(c, 0, 4, PLAIN) * factor + below, _code(c, 1, 4, PLAIN) * factor + near)
            d2 = tl.join(_code(d, 0, 4, PLAIN) * factor + below, _code(d, 1, 4, PLAIN) * factor + near)
            wide = tl.permute(tl.join(tl.join(a2, b2), tl.join(c2, d2)), (0, 1, 5, 4, 3, 2))
        else:
            ab = tl.join(_code(a, 0, 8, PLAIN) * factor + below, _code(b, 0, 8, PLAIN) * factor + below)
            cd = tl.join(_code(c, 0, 8, PLAIN) * factor + below, _code(d, 0, 8, PLAIN) * factor + below)
            wide = tl.permute(tl.join(ab, cd), (0, 1, 4, 3, 2))
    return tl.reshape(wide, (TILE_N, TILE_U * unit)).to(dtype)


@jit
def _load_units(
    words: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    units: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load the weight units with the indices `units` (U,) of outputs `n` (N,).

    Returns words (N, U, 4), float32 scales (N, U), the indices of the units' groups, and whether these exist.
    """
    unit: tl.constexpr = 128 // BITS
    num_units: tl.constexpr = (INPUTS + _CHUNK - 1) // _CHUNK * (_CHUNK // unit)
    num_groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    inside = (n < OUTPUTS)[:, None] & (units < num_units)[None, :]
    word_index = (n.to(tl.int64)[:, None] * num_units + units[None, :])[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    weight = tl.load(words + word_index, mask=inside[:, :, None], other=0)
    groups = n[:, None] * num_groups + (units * unit // GROUP)[None, :]
    in_groups = inside & (units * unit < INPUTS)[None, :]
    return weight, tl.load(scale + groups, mask=in_groups, other=0.0).to(tl.float32), groups, in_groups


@jit
def _shift_byte(words: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """Shift byte `shift` of each word to bits 15 to 22, the highest bits of a float32's mantissa."""
    if shift < 2:
        return words << (15 - 8 * shift)
    return words >> (8 * shift - 15)


@jit
def _code(shifted: tl.tensor, half: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Convert bits shifted by `_shift_byte` to float32, plus an offset.

    Returns the byte plus 256 with BITS 8. With BITS 4, returns its lower half plus 256 or its upper half plus 16.
    """
    if BITS == 8:
        return _masked(shifted, 0x7F8000, 0x43800000, PLAIN)
    if half == 0:
        return _masked(shifted, 0x78000, 0x43800000, PLAIN)
    return _masked(shifted, 0x780000, 0x41800000, PLAIN)


@jit
def _masked(words: tl.tensor, mask: tl.constexpr, exponent: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Return words & mask | exponent as float32, with one instruction where the assembler would use two."""
    if PLAIN:
        bits = (words & mask) | exponent
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [words, tl.full((), mask, tl.int32), tl.full((), exponent, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return bits.to(tl.float32, bitcast=True)


@jit
def _e4m3(words: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """Convert byte `shift` of each word from float8 e4m3 to float32, times 2^-120.

    The bits of sign, exponent and mantissa are moved to their positions in a float32. The factor results from the
    exponent biases of the two formats, 7 and 127.
    """
    return (((words << (24 - 8 * shift)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@jit
def _store(
    total: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    add: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    num_rows: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> None:
    """Store (TILE_N, TILE_M) sums, after applying `row_scale`, `bias` and `add`."""
    in_n = n < OUTPUTS
    if row_scale is not None:
        total *= tl.load(row_scale + m, mask=m < num_rows, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + n, mask=in_n, other=0.0)[:, None]
    out_index = m.to(tl.int64)[None, :] * OUTPUTS + n[:, None]
    inside = in_n[:, None] & (m < num_rows)[None, :]
    if add is not None:
        total += tl.load(add + out_index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + out_index, total.to(out.dtype.element_ty), mask=inside)


def check_product(x: Tensor, add: Tensor | None, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    if x.dim() < 1 or x.shape[-1] != inputs or x.dtype not in FLOAT_DTYPES:
        require(False, "x", x, f"(..., {inputs}), floating,")
    if add is not None and (add.shape != (*x.shape[:-1], outputs) or add.dtype not in FLOAT_DTYPES):
        require(False, "add", add, f"{(*x.shape[:-1], outputs)}, floating,")


def _packed_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits into 32-bit words, (outputs, units, 4) int32, padded to a multiple of CHUNK inputs."""
    wide = pad(codes, (0, -codes.shape[1] % CHUNK))
    numbers = wide.view(len(codes), -1, 32 // bits, _WORDS_PER_UNIT).transpose(2, 3)  # word by word
    if bits == 4:
        numbers = numbers[..., 0::2] + numbers[..., 1::2] * 16
    return numbers.contiguous().view(torch.int32)[..., 0].contiguous()

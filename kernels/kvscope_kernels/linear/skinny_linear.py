"""x @ weight.T for the few rows of a decode step, limited by the time of reading the weight once.

Decides which matmuls the kernels compute, and with which tiles; torch (cuBLAS) computes all others. On compute
capability 9, the kernels are used for all supported matmuls, as measured there; on other GPUs if a measurement at
startup favors them (`linear.choice`).
"""

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.launch import compute_capability, has_little_shared, num_multiprocessors
from kvscope_kernels.triton_language import (
    add_product,
    cdiv,
    is_interpreting,
    jit_varying,
    next_power_of_2,
    require_triton,
    tl,
)

MAX_ROWS: Final = 16
"""Maximum number of rows of x for the kernels. With more rows, the work per weight increases, and cuBLAS is faster."""
_MAX_TILE_K: Final = 2048
_TILE_ELEMENTS: Final = 8192
"""Number of weights in a tile for a single row of x: 64 per thread, all loaded concurrently."""
_LOAD_BYTES: Final = 16


class LinearTiles(NamedTuple):
    """Tile of one program: TILE_M rows of x by TILE_N rows of the weight, summed over TILE_K inputs at a time.
    A single row of x is summed without matrix units.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int


class FewRows(NamedTuple):
    """Numbers of rows of x for which the kernels replace torch's matmul with a weight."""

    single: bool
    several: bool
    """Whether the kernels are used for 2 to `MAX_ROWS` rows."""

    def includes(self, rows: int) -> bool:
        return self.single if rows == 1 else self.several and 1 < rows <= MAX_ROWS


ALWAYS: Final = FewRows(True, True)
NEVER: Final = FewRows(False, False)


class Linear(Protocol):
    """Signature of `linear` and `linear_torch`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        few_rows: FewRows | None = None,
    ) -> Tensor: ...


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    few_rows: FewRows | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, summed in float32.

    Args:
        x: (..., inputs), floating-point.
        weight: (outputs, inputs) with the dtype of x.
        bias: (outputs,), or None.
        dtype: Dtype of the result, either that of x (default) or float32.
        few_rows: Numbers of rows for which the kernels are used if they support the matmul. With None, the kernels are
            used on GPUs of compute capability 9 only, where they are 1.1 times as fast as cuBLAS for one row, and 1.07
            times for 16.

    Returns:
        (..., outputs).

    Raises:
        ValueError: Unsupported arguments.
    """
    check_linear(x, weight, bias, dtype)
    require_triton()
    rows = x.numel() // max(1, x.shape[-1])
    capability = compute_capability(x.device)
    if not (few_rows or default_few_rows(capability)).includes(rows) or not supports_product(weight):
        return linear_torch(x, weight, bias, dtype)
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=dtype or x.dtype, device=x.device)
    tiles = linear_tiles(rows, outputs, inputs, num_multiprocessors(x.device), capability)
    _skinny_linear_kernel[(cdiv(outputs, tiles.tile_n),)](
        x.contiguous(),
        weight,
        bias,
        out,
        rows,
        outputs,
        inputs,
        **linear_constants(outputs, inputs, tiles),
        UPCAST_DOT=is_interpreting(),
        num_warps=4,
        num_stages=tiles.num_stages,
    )
    return out


def default_few_rows(capability: int) -> FewRows:
    """Return the numbers of rows for which the kernels are used without a measurement at startup."""
    return ALWAYS if 90 <= capability < 100 else NEVER


def supports_product(weight: Tensor) -> bool:
    """Whether the kernels support matmuls of few rows with this weight."""
    if weight.element_size() != 2 or not weight.is_contiguous():
        return False
    return weight.shape[1] * weight.element_size() % _LOAD_BYTES == 0


def linear_tiles(rows: int, outputs: int, inputs: int, multiprocessors: int, capability: int) -> LinearTiles:
    """Return the tiles, as measured on an H100.

    With few programs, each must have more tiles in flight. On a GPU with only 99 KiB of shared memory per program,
    there are more programs instead, two per multiprocessor.
    """
    if rows == 1:
        dividing_k = next((each for each in (2048, 1024, 512) if inputs % each == 0), 0)
        tile_k = dividing_k or min(_MAX_TILE_K, next_power_of_2(inputs))
        return LinearTiles(1, max(1, min(_TILE_ELEMENTS // tile_k, next_power_of_2(outputs))), tile_k, 1)
    if has_little_shared(capability):
        return LinearTiles(16, 64, 128, 3) if cdiv(outputs, 64) >= multiprocessors else LinearTiles(16, 32, 256, 3)
    return LinearTiles(16, 64, 128, 7 if 2 * cdiv(outputs, 64) <= multiprocessors else 5)


def linear_constants(outputs: int, inputs: int, tiles: LinearTiles) -> dict[str, int | bool]:
    """Return the kernel's constants that depend on the shapes.

    The shapes themselves are not constants: Triton would unroll the loop of known length, which made seven iterations
    for one row 7 % slower.
    """
    return {
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "TILE_K": tiles.tile_k,
        "WHOLE_N": outputs % tiles.tile_n == 0,
        "WHOLE_K": inputs % tiles.tile_k == 0,
    }


@jit_varying(numbers=("num_rows",))
def _skinny_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """Each program computes TILE_N outputs of all rows.

    The matrix multiplication is weight times transposed x, so that rows of the weight are its rows, and rows of x its
    columns.
    """
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    in_n = (n < outputs) | WHOLE_N
    column = tl.arange(0, TILE_K)
    weights = weight + n.to(tl.int64)[:, None] * inputs + column[None, :]
    if TILE_M == 1:
        parts = tl.zeros([TILE_N, TILE_K], tl.float32)
        for start in range(0, inputs, TILE_K):
            inside = (start + column < inputs) | WHOLE_K
            tile = tl.load(weights + start, mask=in_n[:, None] & inside[None, :], other=0.0)
            numbers = tl.load(x + start + column, mask=inside, other=0.0)
            parts += tile.to(tl.float32) * numbers.to(tl.float32)[None, :]
        sums = tl.sum(parts, 1)
        if bias is not None:
            sums += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
        tl.store(out + n, sums.to(out.dtype.element_ty), mask=in_n)
    else:
        m = tl.arange(0, TILE_M)
        in_m = m < num_rows
        rows = x + m[:, None] * inputs + column[None, :]
        totals = tl.zeros([TILE_N, TILE_M], tl.float32)
        for start in range(0, inputs, TILE_K):
            inside = (start + column < inputs) | WHOLE_K
            tile = tl.load(weights + start, mask=in_n[:, None] & inside[None, :], other=0.0)
            numbers = tl.load(rows + start, mask=in_m[:, None] & inside[None, :], other=0.0)
            totals = add_product(tile, numbers, totals, UPCAST_DOT)
        if bias is not None:
            totals += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        out_pointers = out + m[None, :] * outputs + n[:, None]
        tl.store(out_pointers, totals.to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


def linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    few_rows: FewRows | None = None,
) -> Tensor:
    """Reference of `linear`, and the implementation for matmuls that the kernels do not support. Ignores `few_rows`."""
    check_linear(x, weight, bias, dtype)
    if dtype is None or dtype == x.dtype:
        return functional.linear(x, weight, bias)
    if x.device.type == "cpu":
        wide = None if bias is None else bias.float()
        return functional.linear(x.float(), weight.float(), wide)
    rows = x.reshape(-1, x.shape[-1])
    product = torch.mm(rows, weight.t(), out_dtype=dtype).view(*x.shape[:-1], len(weight))
    return product if bias is None else product.add_(bias)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> None:
    if weight.dim() != 2 or weight.dtype not in FLOAT_DTYPES:
        require(False, "weight", weight, "(outputs, inputs), floating,")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        require(False, "x", x, f"(..., {weight.shape[1]}) {weight.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOAT_DTYPES):
        require(False, "bias", bias, f"({len(weight)},), floating,")
    if dtype not in (None, x.dtype, torch.float32):
        require(False, "dtype", dtype, f"None, {x.dtype} or torch.float32")

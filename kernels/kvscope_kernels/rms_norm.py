"""RMSNorm in float32 for any input dtype, optionally of the sum of two inputs, which is returned too. One
launch replaces six.
"""

import torch
from torch import Tensor

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.triton_language import jit, next_power_of_2, require_triton, tl

_MAX_SIZE = 65536
"""Maximum size of the last axis, because one program processes a row in registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32.

    Args:
        x: (..., size), floating-point; copied if rows are not contiguous.
        weight: (size,) float32, contiguous.
        eps: () float32.
        dtype: Dtype of the result.

    Returns:
        (..., size) of `dtype`.

    Raises:
        ValueError: Unsupported arguments.

    Source: Zhang and Sennrich, Root mean square layer normalization, 2019.
    """
    _check(x, weight, eps)
    require_triton()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), None, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum x + delta, in the dtype of x, and its norm, as needed between two halves of a layer.

    x and delta are (tokens, size), floating-point, possibly of different dtypes; the other arguments are as for
    `rms_norm`. The sum is rounded to its dtype before it is normed. Raises ValueError for unsupported arguments.
    """
    _check(x, weight, eps)
    if delta.shape != x.shape or x.dim() != 2 or delta.dtype not in FLOAT_DTYPES:
        require(False, "delta", delta, f"(tokens, size) as x, {tuple(x.shape)}, floating,")
    require_triton()
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x, delta, total, weight, eps, out)
    return total, out


def _launch(x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, eps: Tensor, out: Tensor) -> None:
    rows = (x if x.stride(-1) == 1 else x.contiguous(), delta if delta is None else delta.contiguous())
    if not len(x):
        return
    _rms_norm_kernel[(len(x),)](*rows, total, weight, eps, out, rows[0].stride(0), **norm_constants(x.shape[-1]))


def norm_constants(size: int) -> dict[str, int]:
    tile = next_power_of_2(size)
    return {"SIZE": size, "TILE": tile, "num_warps": min(16, max(1, tile // 512))}


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each program processes one row. `delta` and `total`, both or neither, are contiguous, as is `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < SIZE
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        numbers += tl.load(delta + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + column, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers) / SIZE + tl.load(eps))
    normed = numbers * factor * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference of `rms_norm`, and the implementation for CPUs without C. A weight may also be (heads, size)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return torch.mul(x, factor).mul_(weight).to(dtype)


def add_rms_norm_torch(
    x: Tensor, delta: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm`, and the implementation for CPUs without C."""
    total = (x + delta).to(x.dtype)
    return total, rms_norm_torch(total, weight, eps, dtype)


def _check(x: Tensor, weight: Tensor, eps: Tensor) -> None:
    if x.dim() < 1 or x.dtype not in FLOAT_DTYPES or not 0 < x.shape[-1] <= _MAX_SIZE:
        require(False, "x", x, f"(..., size), floating, with a size of 1 to {_MAX_SIZE},")
    if weight.shape != x.shape[-1:] or weight.dtype != torch.float32 or not weight.is_contiguous():
        require(False, "weight", weight, f"({x.shape[-1]},) float32, contiguous,")
    if eps.dim() != 0 or eps.dtype != torch.float32 or eps.device != x.device:
        require(False, "eps", eps, f"() float32 on {x.device}")

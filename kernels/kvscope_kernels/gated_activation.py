"""Gated activation of a feed-forward block, act(gate) * up, in one launch. Gate and up are the two halves of
one linear layer's output.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.triton_language import cdiv, jit, require_triton, tl

SILU: Final = 0
GELU_TANH: Final = 1
ACTIVATIONS: Final[dict[int, Callable[[Tensor], Tensor]]] = {
    SILU: silu,
    GELU_TANH: lambda x: gelu(x, approximate="tanh"),
}
"""Torch function of each kind of activation."""

_SILU = tl.constexpr(SILU)
_GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(y) is 2 * sigmoid(2 * y) - 1
_GELU_CUBIC = tl.constexpr(0.044715)
_TILE = 1024


def gated_activation(both: Tensor, kind: int) -> Tensor:
    """Return act(both[..., :size]) * both[..., size:], computed in float32.

    Args:
        both: (..., 2 * size), floating-point; copied if not contiguous.
        kind: SILU or GELU_TANH.

    Returns:
        (..., size) in the dtype of `both`.

    Raises:
        ValueError: Unsupported arguments.

    Source: Shazeer, GLU variants improve transformer, 2020.
    """
    _check(both, kind)
    require_triton()
    both = both.contiguous()
    size = both.shape[-1] // 2
    out = torch.empty((*both.shape[:-1], size), dtype=both.dtype, device=both.device)
    num_rows = out.numel() // size
    if num_rows:
        _gated_activation_kernel[(num_rows, cdiv(size, _TILE))](both, out, **gate_constants(size, kind), num_warps=4)
    return out


def gate_constants(size: int, kind: int) -> dict[str, int]:
    return {"SIZE": size, "TILE": _TILE, "KIND": kind}


@jit
def _gated_activation_kernel(
    both: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gate = tl.load(both + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if KIND != _SILU:
        slope = _GELU_SLOPE * (gate + _GELU_CUBIC * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


def gated_activation_torch(both: Tensor, kind: int) -> Tensor:
    """Reference of `gated_activation`, and the implementation for CPUs without C."""
    _check(both, kind)
    size = both.shape[-1] // 2
    return ACTIVATIONS[kind](both[..., :size]).mul_(both[..., size:])


def _check(both: Tensor, kind: int) -> None:
    if both.dim() < 1 or both.dtype not in FLOAT_DTYPES or both.shape[-1] < 2 or both.shape[-1] % 2:
        require(False, "both", both, "(..., 2 * size), floating,")
    if kind not in ACTIVATIONS:
        require(False, "kind", kind, "SILU or GELU_TANH")

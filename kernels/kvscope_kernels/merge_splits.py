"""Joining the partial results of a decode that was cut: the last launch of `paged_decode_attention`."""

from torch import Tensor

from kvscope_kernels.launch import padded_dim
from kvscope_kernels.triton_language import jit_varying, tl

_TILE_S = 16  # splits joined at once


def merge_splits(partial: Tensor, partial_lse: Tensor, ranges: Tensor, out: Tensor) -> None:
    """Weigh the parts of each request by their share of the softmax, into `out`.

    With f, n = ranges[b] and w_s = 2^(partial_lse[s, h]):
        out[b, h] = sum_{f <= s < f + n} w_s partial[s, h] / sum_{f <= s < f + n} w_s
    Requests of one part are left alone: the decode kernel wrote them. Other parts are not read.

    partial      (num_parts, num_heads, value_dim) float32, contiguous; each part's own softmax
    partial_lse  (num_parts, num_heads) float32, contiguous; log2 of each part's sum of exp
    ranges       (batch, 2) int32, contiguous: each request's first part and how many it has
    out          (batch, num_heads, value_dim), contiguous last axis
    """
    batch, num_heads, value_dim = out.shape
    _merge_splits_kernel[(batch * num_heads,)](
        partial,
        partial_lse,
        ranges,
        out,
        *out.stride()[:2],
        **merge_constants(num_heads, value_dim),
        num_warps=4,
    )


def merge_constants(num_heads: int, value_dim: int) -> dict[str, int]:
    """The kernel's constants that follow from the shapes."""
    return {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "TILE_S": _TILE_S, "TILE_V": padded_dim(value_dim)}


@jit_varying(pointers=("ranges",))
def _merge_splits_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    ranges: tl.tensor,
    out: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program: one head of one request."""
    request = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    num_parts = tl.load(ranges + 2 * request + 1)
    if num_parts == 1:
        return
    first = tl.load(ranges + 2 * request).to(tl.int64)
    dim = tl.arange(0, TILE_V)
    top = float("-inf")
    total = 0.0
    weighted = tl.zeros([TILE_V], tl.float32)
    for start in range(0, num_parts, TILE_S):
        part = start + tl.arange(0, TILE_S)
        index = (first + part) * NUM_HEADS + head
        lse = tl.load(partial_lse + index, mask=part < num_parts, other=float("-inf"))
        inside = (part < num_parts)[:, None] & (dim < VALUE_DIM)[None, :]
        found = tl.load(partial + index[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(found * weight[:, None], 0)
        top = new_top
    row = out + request * out_stride_t + head * out_stride_h
    tl.store(row + dim, (weighted / total).to(out.dtype.element_ty), mask=dim < VALUE_DIM)

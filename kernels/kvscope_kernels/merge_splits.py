"""Joining the partial results of attention that was cut: the last launch of decode, and of prefill in short runs."""

from torch import Tensor

from kvscope_kernels.launch import padded_dim
from kvscope_kernels.triton_language import jit_varying, tl

_TILE_S = 16  # splits joined at once


def merge_splits(
    partial: Tensor, partial_lse: Tensor, ranges: Tensor, out: Tensor, query_start: Tensor | None = None
) -> None:
    """Weigh the parts of each request by their share of the softmax, into `out`.

    With f, n = ranges[b], w_s = 2^(partial_lse[s, i, h]) and t the row of the request's query i, for decode b itself:
        out[t, h] = sum_{f <= s < f + n} w_s partial[s, i, h] / sum_{f <= s < f + n} w_s
    Requests of one part are left alone: they were written as a whole. Other parts are not read.

    partial      (num_parts, max_queries * num_heads, value_dim) float32, contiguous; each part's own softmax
    partial_lse  (num_parts, max_queries * num_heads) float32, contiguous; log2 of each part's sum of exp, -inf where a
                 part has nothing that the query sees
    ranges       (batch, 2) int32, contiguous: each request's first part and how many it has
    out          (num_tokens, num_heads, value_dim), contiguous last axis
    query_start  (batch + 1,) int32: see `QueryRuns.start`; None for one query each
    """
    num_heads, value_dim = out.shape[1:]
    max_queries = partial.shape[1] // num_heads
    _merge_splits_kernel[(len(ranges) * num_heads, max_queries)](
        partial,
        partial_lse,
        ranges,
        query_start,
        out,
        *out.stride()[:2],
        **merge_constants(num_heads, value_dim),
        num_warps=4,
    )


def merge_constants(num_heads: int, value_dim: int) -> dict[str, int]:
    """The kernel's constants that follow from the shapes."""
    return {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "TILE_S": _TILE_S, "TILE_V": padded_dim(value_dim)}


@jit_varying(pointers=("ranges", "query_start"))
def _merge_splits_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    ranges: tl.tensor,
    query_start: tl.tensor,
    out: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program: one head of one query of a request."""
    request = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    query = tl.program_id(1)
    row = request
    if query_start is not None:
        row = tl.load(query_start + request).to(tl.int64) + query
        if row >= tl.load(query_start + request + 1):
            return
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
        index = ((first + part) * tl.num_programs(1) + query) * NUM_HEADS + head
        lse = tl.load(partial_lse + index, mask=part < num_parts, other=float("-inf"))
        inside = (part < num_parts)[:, None] & (dim < VALUE_DIM)[None, :]
        found = tl.load(partial + index[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing yet: -inf - -inf would be NaN
        shrink = tl.exp2(top - finite_top)
        weight = tl.exp2(lse - finite_top)
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(found * weight[:, None], 0)
        top = new_top
    place = out + row * out_stride_t + head * out_stride_h
    tl.store(place + dim, (weighted / total).to(out.dtype.element_ty), mask=dim < VALUE_DIM)

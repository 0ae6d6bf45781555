"""Joining the partial results of a split decode: the second launch of `paged_decode_attention`."""

from torch import Tensor

from kvscope_kernels.launch import padded_dim
from kvscope_kernels.triton_language import jit_varying, tl

_TILE_S = 16  # splits joined at once


def merge_splits(
    partial: Tensor, partial_lse: Tensor, seq_lens: Tensor, out: Tensor, *, window: int, split_tokens: int
) -> None:
    """Weigh each request's splits by their share of the softmax, into `out`.

    With S = ceil(min(seq_lens[b], window) / split_tokens) and w_s = 2^(partial_lse[b, h, s]):
        out[b, h] = sum_{s < S} w_s partial[b, h, s] / sum_{s < S} w_s
    Requests of at most one split are left alone: the decode kernel wrote them. Splits from S on are not read.

    partial      (batch, num_heads, num_splits, value_dim) float32, contiguous; each split's own softmax
    partial_lse  (batch, num_heads, num_splits) float32, contiguous; log2 of each split's sum of exp
    seq_lens     (batch,) int32
    out          (batch, num_heads, value_dim), contiguous last axis
    """
    batch, num_heads, num_splits, value_dim = partial.shape
    _merge_splits_kernel[(batch * num_heads,)](
        partial,
        partial_lse,
        seq_lens,
        out,
        window,
        split_tokens,
        num_splits,
        *out.stride()[:2],
        **merge_constants(num_heads, value_dim),
        num_warps=4,
    )


def merge_constants(num_heads: int, value_dim: int) -> dict[str, int]:
    """The kernel's constants that follow from the shapes."""
    return {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "TILE_S": _TILE_S, "TILE_V": padded_dim(value_dim)}


@jit_varying(numbers=("split_tokens", "num_splits"), pointers=("seq_lens",))
def _merge_splits_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    split_tokens: tl.tensor,
    num_splits: tl.tensor,
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
    visible = tl.minimum(tl.load(seq_lens + request), window)
    if visible <= split_tokens:
        return
    used = (visible + split_tokens - 1) // split_tokens
    base = (request * NUM_HEADS + head) * num_splits
    dim = tl.arange(0, TILE_V)
    top = float("-inf")
    total = 0.0
    weighted = tl.zeros([TILE_V], tl.float32)
    for start in range(0, used, TILE_S):
        split = start + tl.arange(0, TILE_S)
        lse = tl.load(partial_lse + base + split, mask=split < used, other=float("-inf"))
        inside = (split < used)[:, None] & (dim < VALUE_DIM)[None, :]
        part = tl.load(partial + (base + split)[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(part * weight[:, None], 0)
        top = new_top
    row = out + request * out_stride_t + head * out_stride_h
    tl.store(row + dim, (weighted / total).to(out.dtype.element_ty), mask=dim < VALUE_DIM)

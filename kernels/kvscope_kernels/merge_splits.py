"""Merges the partial results of split attention: the last launch of decode, and of prefill with few queries per
request.
"""

import math
from typing import NamedTuple

from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_scores.block_attention import check_shares
from kvscope_kernels.attention_scores.block_scores import num_columns
from kvscope_kernels.decode.bounds import block_sum_capacity
from kvscope_kernels.decode.plan import BlockSums, DecodePlan, DecodePlans
from kvscope_kernels.decode.plan_kernel import PART_FIELDS
from kvscope_kernels.launch import padded_dim
from kvscope_kernels.triton_language import jit, jit_varying, next_power_of_2, tl

_TILE_S = 16  # splits merged at a time
_SHARES_TILE = 2048  # heads times blocks
_FIELDS = tl.constexpr(PART_FIELDS)


class BlockSumSpec(NamedTuple):
    """Size of the block sums that a plan stores. All fields are 0 if it stores none."""

    block_size: int = 0
    block_sum_capacity: int = 0
    """Maximum number of blocks of all requests together whose sums are stored."""
    piece: int = 0
    """Number of tokens per sum: a block, or the largest part of a block that divides a tile."""


def block_sum_spec(args: AttentionArgs, shares: Tensor | None, max_visible: int, tile_n: int) -> BlockSumSpec:
    """Return the size of the block sums needed to compute `shares` for decodes. Raises ValueError for an
    invalid `shares`.
    """
    if shares is None:
        return BlockSumSpec()
    block_size = args.k_cache.shape[1]
    check_shares(args.query, shares, num_columns(args.block_tables, block_size, args.max_seq_len))
    piece = math.gcd(block_size, tile_n)
    batch, num_heads = args.query.shape[:2]
    return BlockSumSpec(
        block_size, block_sum_capacity(batch, max_visible, block_size, num_heads, block_size // piece), piece
    )


class ShareBuffers(NamedTuple):
    """Block sums of a batch of decodes, and the tensor to which attention shares are added."""

    plan: DecodePlan
    sums: BlockSums
    shares: Tensor
    """(batch, blocks) float32, contiguous last axis: see `block_attention_torch`."""
    sum_spec: BlockSumSpec


def share_buffers(
    plans: DecodePlans, plan: DecodePlan, sum_spec: BlockSumSpec, num_heads: int, shares: Tensor | None
) -> ShareBuffers | None:
    """Return the buffers for measuring attention shares, or None if `shares` is None."""
    if shares is None:
        return None
    return ShareBuffers(plan, plans.sums(plan, num_heads, sum_spec.block_size // sum_spec.piece), shares, sum_spec)


def merge_splits(
    partial: Tensor,
    partial_lse: Tensor,
    ranges: Tensor,
    out: Tensor,
    query_start: Tensor | None = None,
    measured: ShareBuffers | None = None,
) -> None:
    """Combine the parts of each request, weighted by their share of the softmax, into `out`.

    With f, n = ranges[b], w_s = 2^(partial_lse[s, i, h]) and t the row of the request's query i (t = b for decode):

        out[t, h] = sum_{f <= s < f + n} w_s partial[s, i, h] / sum_{f <= s < f + n} w_s

    Requests with one part are skipped, because their result is in `out` already. Unused parts are not read.

    Args:
        partial: (num_parts, max_queries * num_heads, value_dim) float32, contiguous; the softmax-weighted sum of each
            part's values.
        partial_lse: (num_parts, max_queries * num_heads) float32, contiguous; log2 of each part's sum of exp, -inf if a
            part has no token that the query attends to.
        ranges: (batch, 2) int32, contiguous: each request's first part, and number of parts.
        out: (num_tokens, num_heads, value_dim), contiguous last axis.
        query_start: (batch + 1,) int32, see `QueryRuns.start`; None if each request has one query.
        measured: For decodes: the share of each block is added to its `shares`, in the order of heads. With m_i the sum
            of 2^(piece_sums[p, h]) over the pieces p of block i, and n as above: shares[b, i] += mean over h of m_i /
            sum_{f <= s < f + n} 2^(lse[s, h]). None if shares are not measured.
    """
    num_heads, value_dim = out.shape[1:]
    max_queries = partial.shape[1] // num_heads
    num_measured = 0 if measured is None else measured.plan.bounds.num_parts
    _merge_splits_kernel[(len(ranges) * num_heads + num_measured, max_queries)](
        partial,
        partial_lse,
        ranges,
        query_start,
        out,
        *(None, None, None, None, None) if measured is None else _share_tensors(measured),
        len(ranges),
        0 if measured is None else measured.shares.stride(0),
        *out.stride()[:2],
        **merge_constants(num_heads, value_dim),
        **shares_constants(num_heads, BlockSumSpec() if measured is None else measured.sum_spec),
        num_warps=4,
    )


def _share_tensors(measured: ShareBuffers) -> tuple[Tensor | None, ...]:
    plan, sums = measured.plan, measured.sums
    return plan.parts, plan.sum_offsets, sums.piece_sums, sums.lse, measured.shares


def merge_constants(num_heads: int, value_dim: int) -> dict[str, int]:
    return {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "TILE_S": _TILE_S, "TILE_V": padded_dim(value_dim)}


def shares_constants(num_heads: int, sum_spec: BlockSumSpec) -> dict[str, int]:
    tile_h = next_power_of_2(num_heads)
    tile_p = max(1, _SHARES_TILE // tile_h)
    return {"BLOCK_SIZE": sum_spec.block_size, "PIECE": sum_spec.piece, "TILE_H": tile_h, "TILE_P": tile_p}


@jit_varying(numbers=("batch", "shares_stride"), pointers=("ranges", "query_start", "parts", "sum_offsets", "shares"))
def _merge_splits_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    ranges: tl.tensor,
    query_start: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    sum_offsets: tl.tensor,
    piece_sums: tl.tensor,
    part_lse: tl.tensor,
    shares: tl.tensor,
    batch: tl.tensor,
    shares_stride: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_P: tl.constexpr,
) -> None:
    """Each program merges one head of one query of a request.

    Further programs compute the attention shares of one part each.
    """
    if PIECE:
        part_of_program = tl.program_id(0) - batch * NUM_HEADS
        if part_of_program >= 0:
            _add_block_shares(
                parts,
                sum_offsets,
                piece_sums,
                part_lse,
                ranges,
                shares,
                part_of_program,
                shares_stride,
                NUM_HEADS,
                BLOCK_SIZE,
                PIECE,
                TILE_S,
                TILE_H,
                TILE_P,
            )
            return
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
        part_result = tl.load(partial + index[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no visible token yet: -inf - -inf would be NaN
        shrink = tl.exp2(top - finite_top)
        weight = tl.exp2(lse - finite_top)
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(part_result * weight[:, None], 0)
        top = new_top
    out_row = out + row * out_stride_t + head * out_stride_h
    tl.store(out_row + dim, (weighted / total).to(out.dtype.element_ty), mask=dim < VALUE_DIM)


@jit
def _add_block_shares(
    parts: tl.tensor,
    sum_offsets: tl.tensor,
    piece_sums: tl.tensor,
    part_lse: tl.tensor,
    ranges: tl.tensor,
    shares: tl.tensor,
    part: tl.tensor,
    shares_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_P: tl.constexpr,
) -> None:
    """Add the attention shares of the blocks in one part. Parts have no block in common, so the sums are
    deterministic.
    """
    request = tl.load(parts + part * _FIELDS).to(tl.int64)
    if request < 0:  # unused part
        return
    sum_offset = tl.load(sum_offsets + part).to(tl.int64)
    if sum_offset < 0:
        return
    head = tl.arange(0, TILE_H)
    top = tl.full([TILE_H], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H], tl.float32)
    first = tl.load(ranges + 2 * request).to(tl.int64)
    num_parts = tl.load(ranges + 2 * request + 1)
    for start in range(0, num_parts, TILE_S):
        number = start + tl.arange(0, TILE_S)
        at = (first + number)[:, None] * NUM_HEADS + head[None, :]
        inside = (number < num_parts)[:, None] & (head < NUM_HEADS)[None, :]
        lse = tl.load(part_lse + at, mask=inside, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite_top) + tl.sum(tl.exp2(lse - finite_top[None, :]), 0)
        top = new_top
    total_lse = tl.where(total > 0.0, top + tl.log2(total), 0.0)
    begin = tl.load(parts + part * _FIELDS + 1)
    end = tl.load(parts + part * _FIELDS + 2)
    first_block = begin // BLOCK_SIZE
    num_blocks = (end + (BLOCK_SIZE - 1)) // BLOCK_SIZE - first_block
    for start in range(0, num_blocks, TILE_P):
        block = start + tl.arange(0, TILE_P)
        share = tl.zeros([TILE_P], tl.float32)
        for number in range(BLOCK_SIZE // PIECE):
            position = (first_block + block) * BLOCK_SIZE + number * PIECE
            is_visible = (position < end) & (position + PIECE > begin)
            at = ((sum_offset + block) * (BLOCK_SIZE // PIECE) + number)[:, None] * NUM_HEADS + head[None, :]
            inside = is_visible[:, None] & (head < NUM_HEADS)[None, :]
            piece_lse = tl.load(piece_sums + at, mask=inside, other=float("-inf"))
            share += tl.sum(tl.exp2(piece_lse - total_lse[None, :]), 1)
        share_pointers = shares + request * shares_stride + first_block + block
        previous = tl.load(share_pointers, mask=block < num_blocks, other=0.0)
        tl.store(share_pointers, previous + share * (1.0 / NUM_HEADS), mask=block < num_blocks)

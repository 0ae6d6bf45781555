"""How much a block could matter to a query at most: a bound of its scores, from the bounds of its keys alone."""

import math

import torch
from torch import Tensor

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.launch import padded_dim
from kvscope_kernels.relevance.block_bounds import check_bounds
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit_varying, next_power_of_2, require_triton, tl

_MAX_TILE_ELEMENTS = 4096


def block_scores(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    max_seq_len: int | None = None,
) -> Tensor:
    """For each request, KV head and block: no less than any product of a query of that head's group with a key there.

    With [low_d, high_d] the bounds of block block_tables[b, i] in KV head h', and h over the heads that share it:
        out[b, h', i] = max over h of  sum_d max(query[b, h, d] * low_d, query[b, h, d] * high_d)
    and -inf for what is past the request's last block. Scores are these times a factor: the order is the same.

    query         (batch, num_heads, head_dim), any strides with a contiguous last axis
    bounds        (num_blocks, 2, num_kv_heads, head_dim), as `block_bounds` leaves them
    block_tables  (batch, max_blocks) int32; entries past a request's last block may hold anything
    seq_lens      (batch,) int32
    max_seq_len   a bound on seq_lens known to the host; without it, the width of block_tables
    returns       (batch, num_kv_heads, blocks of the longest) float32

    Reads no device data on the host. Raises ValueError. Source: Quest, arXiv 2406.10774, algorithm 1.
    """
    width = _checked_width(query, bounds, block_tables, seq_lens, block_size, max_seq_len)
    require_triton()
    batch, num_heads, head_dim = query.shape
    num_kv_heads = bounds.shape[2]
    out = query.new_empty(batch, num_kv_heads, width, dtype=torch.float32)
    if not out.numel():
        return out
    tiles = score_constants(num_heads // num_kv_heads, head_dim)
    _block_scores_kernel[(batch * num_kv_heads, cdiv(width, tiles["TILE_P"]))](
        query,
        bounds,
        block_tables,
        seq_lens,
        out,
        width,
        block_size,
        *query.stride()[:2],
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        **tiles,
        UPCAST_DOT=is_interpreting(),
        num_warps=4,
    )
    return out


def score_constants(group: int, head_dim: int) -> dict[str, int]:
    """The kernel's constants that follow from the shapes."""
    tile_d = padded_dim(head_dim)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "TILE_M": max(16, next_power_of_2(group)),
        "TILE_P": max(16, min(64, _MAX_TILE_ELEMENTS // tile_d)),
        "TILE_D": tile_d,
    }


@jit_varying(numbers=("width", "table_stride"), pointers=("block_tables", "seq_lens"))
def _block_scores_kernel(
    query: tl.tensor,
    bounds: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    sums: tl.tensor,
    width: tl.tensor,
    block_size: tl.tensor,
    query_stride_t: tl.tensor,
    query_stride_h: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_D: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one request, over TILE_P of its blocks.

    A product with the larger of two numbers is that with the upper one where the query is positive, with the lower
    one where it is negative: two products of tiles instead of a maximum a channel.
    """
    request = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    column = tl.program_id(1) * TILE_P + tl.arange(0, TILE_P)
    seq_len = tl.load(seq_lens + request)
    inside = column * block_size < seq_len
    row = tl.arange(0, TILE_M)
    dim = tl.arange(0, TILE_D)
    rows = query + request * query_stride_t + (kv_head * GROUP + row)[:, None] * query_stride_h
    tile = tl.load(rows + dim[None, :], mask=(row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    block = tl.load(block_tables + request * table_stride + column, mask=inside, other=0).to(tl.int64)
    lows = bounds + (block * (2 * NUM_KV_HEADS) + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    in_bounds = inside[:, None] & (dim < HEAD_DIM)[None, :]
    low = tl.load(lows, mask=in_bounds, other=0.0)
    high = tl.load(lows + NUM_KV_HEADS * HEAD_DIM, mask=in_bounds, other=0.0)
    if UPCAST_DOT:
        tile, low, high = tile.to(tl.float32), low.to(tl.float32), high.to(tl.float32)
    up = tl.where(tile > 0.0, tile, 0.0).to(tile.dtype)
    down = tl.where(tile < 0.0, tile, 0.0).to(tile.dtype)
    score = tl.dot(up, tl.trans(high), input_precision="ieee")
    score += tl.dot(down, tl.trans(low), input_precision="ieee")
    score = tl.where((row < GROUP)[:, None] & inside[None, :], score, float("-inf"))
    to = sums + tl.program_id(0).to(tl.int64) * width + column
    tl.store(to, tl.max(score, 0), mask=column < width)


def block_scores_torch(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    max_seq_len: int | None = None,
) -> Tensor:
    """Reference of `block_scores`, and the CPU's own path. Sums are float32 whatever the bounds are."""
    width = _checked_width(query, bounds, block_tables, seq_lens, block_size, max_seq_len)
    batch, num_heads, head_dim = query.shape
    num_kv_heads = bounds.shape[2]
    column = torch.arange(width, device=query.device)
    outside = column * block_size >= seq_lens[:, None]
    blocks = block_tables[:, :width].masked_fill(outside, 0)
    found = bounds.index_select(0, blocks.flatten()).float().view(batch, width, 2, num_kv_heads, head_dim)
    low, high = found.permute(2, 0, 3, 4, 1)  # (batch, num_kv_heads, head_dim, width)
    rows = query.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.matmul(rows.clamp(min=0), high).add_(torch.matmul(rows.clamp(max=0), low)).amax(2)
    return scores.masked_fill_(outside[:, None], -math.inf)


def _checked_width(
    query: Tensor, bounds: Tensor, block_tables: Tensor, seq_lens: Tensor, block_size: int, max_seq_len: int | None
) -> int:
    if query.dim() != 3 or query.stride(2) != 1 or query.dtype not in FLOAT_DTYPES:
        require(False, "query", query, "(batch, num_heads, head_dim), floating, with contiguous head_dim")
    check_bounds(bounds, bounds.shape[0], query)
    if query.shape[1] % bounds.shape[2] or query.shape[2] != bounds.shape[3]:
        require(False, "query", query, f"a multiple of {bounds.shape[2]} heads of {bounds.shape[3]}, as in bounds,")
    if seq_lens.dtype != torch.int32 or tuple(seq_lens.shape) != tuple(query.shape[:1]):
        require(False, "seq_lens", seq_lens, f"({len(query)},) int32")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or len(block_tables) != len(query):
        require(False, "block_tables", block_tables, f"({len(query)}, max_blocks) int32")
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        require(False, "block_tables", block_tables, "a contiguous last axis")
    width = block_tables.shape[1]
    return width if max_seq_len is None else min(width, cdiv(max_seq_len, block_size))

"""Estimates each block's share of a query's attention from only the bounds of the block's keys."""

import math

import torch
from torch import Tensor

from kvscope_kernels.attention_scores.block_bounds import check_bounds
from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.launch import padded_dim
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit_varying, next_power_of_2, require_triton, tl

MAX_PARTIAL_BYTES = 16 << 20
"""Maximum bytes of intermediate results. A larger batch is processed in several passes."""
_MAX_TILE_ELEMENTS = 4096
NEAR = 0.7
"""Assumed position of a block's keys between the far bound (0) and the near bound (1), which no key exceeds.

The value is above the middle, 0.5, but well below 1, because few keys of a block come close to the near bound in all
channels. See docs/internals/decisions/0019-sparse-decode-ranks-by-attention-share.md.
"""


def block_scores(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    max_seq_len: int | None = None,
) -> Tensor:
    """Estimate, for each request, KV head and block, the log of the share of attention that the block gets.

    With [low_d, high_d] the bounds of block block_tables[b, i] in KV head h', near_d the bound whose product with
    query[b, h, d] is larger, far_d the other one, and h over the heads that share h':

        e[h, i] = scale * sum_d query[b, h, d] * (NEAR * near_d + (1 - NEAR) * far_d)
        out[b, h', i] = ln  sum over h of  exp(e[h, i]) / sum_j exp(e[h, j])

    and -inf past the request's last block. With NEAR = 1, e would be an upper bound of all scores (Quest, arXiv
    2406.10774, algorithm 1, which takes its maximum over h). A value closer to the middle is closer to the scores.
    Since shares are summed, no head with attention on a few blocks dominates the others.

    Works in two steps: estimates per head, then shares of blocks. No device data is read on the host.

    Args:
        query: (batch, num_heads, head_dim), any strides with a contiguous last axis.
        bounds: (num_blocks, 2, num_kv_heads, head_dim), from `block_bounds`.
        block_tables: (batch, max_blocks) int32; entries past a request's last block are ignored.
        seq_lens: (batch,) int32.
        scale: As for decode attention.
        softcap: As for decode attention.
        max_seq_len: Upper bound of seq_lens on the host. If None, the capacity of block_tables is used.

    Returns:
        (batch, num_kv_heads, blocks of the longest request) float32.

    Raises:
        ValueError: Unsupported arguments.
    """
    width = _checked_width(query, bounds, block_tables, seq_lens, block_size, max_seq_len)
    require_triton()
    out = query.new_empty(len(query), bounds.shape[2], width, dtype=torch.float32)
    rows = max(1, MAX_PARTIAL_BYTES // max(1, 4 * query.shape[1] * width))
    for start in range(0, len(query) if width else 0, rows):
        part = slice(start, start + rows)
        estimates = _estimates(query[part], bounds, block_tables[part], seq_lens[part], width, block_size)
        out[part] = _log_shares(estimates, bounds.shape[2], scale, softcap)
    return out


def _log_shares(estimates: Tensor, num_kv_heads: int, scale: float, softcap: float | None) -> Tensor:
    """Convert estimates (n, num_heads, width) to log shares (n, num_kv_heads, width). Both are -inf past a
    request's blocks.
    """
    estimates = estimates.mul_(scale)
    if softcap is not None:
        outside = estimates.isneginf()
        estimates = estimates.div_(softcap).tanh_().mul_(softcap).masked_fill_(outside, -math.inf)
    shares = estimates.log_softmax(-1).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    batch, num_heads, width = shares.shape
    return shares.view(batch, num_kv_heads, num_heads // num_kv_heads, width).logsumexp(2)


def _estimates(
    query: Tensor, bounds: Tensor, block_tables: Tensor, seq_lens: Tensor, width: int, block_size: int
) -> Tensor:
    """Return e of `block_scores` before scaling, (n, num_heads, width) float32, -inf past a request's blocks."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = bounds.shape[2]
    out = query.new_empty(batch, num_heads, width, dtype=torch.float32)
    tiles = score_constants(num_heads // num_kv_heads, head_dim, query.element_size())
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
        NEAR=NEAR,
        UPCAST_DOT=is_interpreting(),
        num_warps=4,
    )
    return out


def score_constants(group: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """Return the kernel's constants that depend on shapes.

    With float32, the dot products are computed in registers, where only smaller tiles fit.
    """
    tile_d = padded_dim(head_dim)
    max_elements = _MAX_TILE_ELEMENTS if element_bytes < 4 else _MAX_TILE_ELEMENTS // 4
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "TILE_M": max(16, next_power_of_2(group)),
        "TILE_P": max(16, min(64, max_elements // tile_d)),
        "TILE_D": tile_d,
    }


def num_columns(block_tables: Tensor, block_size: int, max_seq_len: int | None) -> int:
    """Return the maximum number of blocks per request, from the width of the tables and `max_seq_len`."""
    width = block_tables.shape[1]
    return width if max_seq_len is None else min(width, cdiv(max_seq_len, block_size))


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
    NEAR: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one request, over TILE_P of its blocks.

    The near bound is the upper bound where the query is positive, and the lower bound where it is negative. So near and
    far estimates are matmuls of tiles, without a choice per channel.
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
    low, high = tl.trans(low), tl.trans(high)
    near = tl.dot(down, low, tl.dot(up, high, input_precision="ieee"), input_precision="ieee")
    far = tl.dot(down, high, tl.dot(up, low, input_precision="ieee"), input_precision="ieee")
    score = tl.where(inside[None, :], NEAR * near + (1.0 - NEAR) * far, float("-inf"))
    to = sums + (request * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row)[:, None] * width + column[None, :]
    tl.store(to, score, mask=(row < GROUP)[:, None] & (column < width)[None, :])


def block_scores_torch(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    max_seq_len: int | None = None,
) -> Tensor:
    """Reference of `block_scores`, and the implementation for CPUs. Sums are float32 for bounds of any dtype."""
    width = _checked_width(query, bounds, block_tables, seq_lens, block_size, max_seq_len)
    batch, num_heads, head_dim = query.shape
    num_kv_heads = bounds.shape[2]
    column = torch.arange(width, device=query.device)
    outside = column * block_size >= seq_lens[:, None]
    blocks = block_tables[:, :width].masked_fill(outside, 0)
    block_bounds = bounds.index_select(0, blocks.flatten()).float().view(batch, width, 2, num_kv_heads, head_dim)
    low, high = block_bounds.permute(2, 0, 3, 4, 1)  # (batch, num_kv_heads, head_dim, width)
    rows = query.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    up, down = rows.clamp(min=0), rows.clamp(max=0)
    far = 1.0 - NEAR
    estimates = torch.matmul(NEAR * up + far * down, high).add_(torch.matmul(far * up + NEAR * down, low))
    estimates = estimates.masked_fill_(outside[:, None, None], -math.inf).flatten(1, 2)
    return _log_shares(estimates, num_kv_heads, scale, softcap)


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
    return num_columns(block_tables, block_size, max_seq_len)

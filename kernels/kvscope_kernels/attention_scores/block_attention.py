"""Where a decode's attention fell: the share of each block of the request, one more pass over the keys alone."""

import torch
from torch import Tensor

from kvscope_kernels.attend_tiles import LOG2_E, first_seen
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.checks import check_attention, require
from kvscope_kernels.host_lengths import Lengths, similar_groups
from kvscope_kernels.kv_formats import as_kernels_see, kv_format, scale_strides, widen
from kvscope_kernels.kv_gather import gather_keys
from kvscope_kernels.latent_blocks import are_latents, plain_latents
from kvscope_kernels.launch import UNBOUNDED, block_tiles
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit_varying, require_triton, tl

MAX_PARTIAL_BYTES = 16 << 20
"""Held at once between the two halves of the operation; larger batches go in parts."""
_CALL_WORTH_ELEMENTS = 1 << 17  # keys read in the time of one more torch call, on one CPU thread
_MOST_ROWS = 16
_LN_2 = tl.constexpr(0.6931471805599453)


def block_attention(args: AttentionArgs, shares: Tensor) -> None:
    """Add to `shares` how much of each request's attention fell on each of its blocks, on the mean of its heads.

    With s_j as in `paged_decode_attention`, without sinks, and C_i the positions of the request's i-th block:
        shares[b, i] += mean over h of  sum_{j in C_i} exp(s_j) / sum_j exp(s_j)
    So a call adds 1 to the sum of each row, and nothing where L is 0.

    args          as decode attention has them
    shares        (batch, at least max_blocks or as many as max_seq_len needs) float32, contiguous

    Twice: the log-sum-exp of each block and head, then a softmax over blocks. Reads no device data on the host.
    Raises ValueError. Source: per-block attention as of H2O (arXiv 2306.14048), by blocks as in Quest (2406.10774).
    """
    _check(args, shares)
    require_triton()
    query = args.query
    width = num_columns(args.block_tables, args.k_cache.shape[1], args.max_seq_len)
    each = 4 * query.shape[1] * width
    if args.k_scale is not None and are_latents(args):
        each = max(each, width * args.k_cache[0].numel() * query.element_size())  # of a request, read back
    rows = max(1, MAX_PARTIAL_BYTES // max(1, each))
    for start in range(0, len(query) if width else 0, rows):
        part = slice(start, start + rows)
        given = {name: getattr(args, name)[part] for name in ("query", "block_tables", "seq_lens")}
        sums = _log_sums(plain_latents(args._replace(**given)), width)
        shares[part, :width] += sums.softmax(-1).mean(1).nan_to_num_(nan=0.0)


def num_columns(block_tables: Tensor, block_size: int, max_seq_len: int | None) -> int:
    """Blocks that the longest request may have."""
    width = block_tables.shape[1]
    return width if max_seq_len is None else min(width, cdiv(max_seq_len, block_size))


def _log_sums(args: AttentionArgs, width: int) -> Tensor:
    """(batch, num_heads, width) float32: ln of the sum of exp(s) of each block, -inf where nothing is seen."""
    query, k_cache, _, block_tables, seq_lens = args[:5]
    k_scale = args.k_scale
    batch, num_heads, head_dim = query.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    form = kv_format(k_cache)
    if num_kv_heads == 1:  # one that very many share, as latents: so many rows of so wide a query are no tile
        num_kv_heads = num_heads // rows_of_one_head(num_heads)
        k_cache = k_cache.expand(-1, -1, num_kv_heads, -1)
        k_scale = None if k_scale is None else k_scale.expand(-1, -1, num_kv_heads)
    tiles = block_tiles(head_dim, num_heads // num_kv_heads, block_size, query.element_size())
    sums = query.new_empty(batch, num_heads, width, dtype=torch.float32)
    _block_attention_kernel[(batch * num_kv_heads, cdiv(width, tiles["TILE_P"]))](
        query,
        as_kernels_see(k_cache, form),
        block_tables,
        seq_lens,
        k_scale,
        sums,
        args.scale,
        args.softcap or 1.0,
        args.sliding_window or UNBOUNDED,
        width,
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *scale_strides(k_scale),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        **tiles,
        KV_FORMAT=form,
        IS_CHUNKED=args.is_chunked,
        HAS_SOFTCAP=args.softcap is not None,
        UPCAST_DOT=is_interpreting(),
        num_warps=4,
    )
    return sums


def rows_of_one_head(num_heads: int) -> int:
    """Of query heads that share one KV head, how many one program takes."""
    return max(rows for rows in range(1, min(num_heads, _MOST_ROWS) + 1) if num_heads % rows == 0)


@jit_varying(numbers=("width", "table_stride"), pointers=("block_tables", "seq_lens"))
def _block_attention_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    k_scale: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    width: tl.tensor,
    query_stride_t: tl.tensor,
    query_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    scale_stride_h: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one request, over TILE_P of its blocks, TILE_S slots at a time.

    Slots that the query does not see are not read: what is there cannot leak, NaN included.
    """
    request = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    begin = tl.program_id(1) * TILE_P
    seq_len = tl.load(seq_lens + request)
    first = first_seen(seq_len - 1, window, IS_CHUNKED)
    row = tl.arange(0, TILE_M)
    head = kv_head * GROUP + row
    dim = tl.arange(0, TILE_D)
    in_query = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    rows = query + request * query_stride_t + head[:, None] * query_stride_h
    tile = tl.load(rows + dim[None, :], mask=in_query, other=0.0)
    if UPCAST_DOT:
        tile = tile.to(tl.float32)
    token = tl.arange(0, TILE_P * TILE_S)
    column = begin + token // TILE_S
    top = tl.full([TILE_M, TILE_P], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M, TILE_P], tl.float32)
    for start in range(0, BLOCK_SIZE, TILE_S):
        slot = start + token % TILE_S
        position = column * BLOCK_SIZE + slot
        inside = (slot < BLOCK_SIZE) & (position >= first) & (position < seq_len)
        block = tl.load(block_tables + request * table_stride + column, mask=inside, other=0).to(tl.int64)
        keys = k_cache + kv_head * k_stride_h + block * k_stride_b + slot * k_stride_s
        in_key = inside[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys[:, None] + dim[None, :], mask=in_key, other=0.0)
        if KV_FORMAT:
            key = widen(key, tile.dtype, KV_FORMAT)
        if UPCAST_DOT:
            key = key.to(tl.float32)
        score = tl.dot(tile, tl.trans(key), input_precision="ieee")
        if KV_FORMAT:
            at = kv_head * scale_stride_h + block * scale_stride_b + slot * scale_stride_s
            score = score * tl.load(k_scale + at, mask=inside, other=0.0)[None, :]
        if HAS_SOFTCAP:
            score = score * scale
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E) / softcap) + 1.0)) * LOG2_E
        else:
            score = score * (scale * LOG2_E)
        score = tl.where(inside[None, :], score, float("-inf"))
        score = tl.reshape(score, [TILE_M, TILE_P, TILE_S])
        new_top = tl.maximum(top, tl.max(score, 2))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite_top) + tl.sum(tl.exp2(score - finite_top[:, :, None]), 2)
        top = new_top
    result = tl.where(total > 0.0, (top + tl.log2(total)) * _LN_2, float("-inf"))
    columns = begin + tl.arange(0, TILE_P)
    to = sums + (request * (NUM_KV_HEADS * GROUP) + head)[:, None] * width + columns[None, :]
    tl.store(to, result, mask=(row < GROUP)[:, None] & (columns < width)[None, :])


def block_attention_torch(args: AttentionArgs, shares: Tensor) -> None:
    """Reference of `block_attention`, and the CPU's own path. Reads the lengths on the host."""
    args = plain_latents(args)
    _check(args, shares)
    query, k_cache = args.query, args.k_cache
    end = args.seq_lens.cpu().numpy().astype("int64")
    first = args.first_seen(end - 1)
    worth = _CALL_WORTH_ELEMENTS // (k_cache.shape[2] * k_cache.shape[3])
    for rows in similar_groups(end - first, worth):
        if not end[rows].any():
            continue
        picked = torch.from_numpy(rows).to(query.device)
        part = args._replace(query=query[picked], block_tables=args.block_tables[picked])
        found = _shares(part, first[rows], end[rows])
        shares[picked, : found.shape[1]] += found


def _shares(args: AttentionArgs, first: Lengths, end: Lengths) -> Tensor:
    """(n, blocks of the longest) of one padded group."""
    query, softcap = args.query, args.softcap
    n, num_heads, head_dim = query.shape
    block_size, num_kv_heads = args.k_cache.shape[1:3]
    width = cdiv(int(end.max()), block_size)
    keys = gather_keys(args.cache, args.block_tables[:, :width], query.dtype)
    rows = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.matmul(rows, keys.permute(0, 2, 3, 1)).float().mul_(args.scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    token = torch.arange(scores.shape[-1], device=query.device)
    begins, ends = (torch.from_numpy(each).to(query.device)[:, None] for each in (first, end))
    hidden = (token < begins) | (token >= ends)
    scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num_(nan=0.0)
    return weights.view(n, num_heads, width, block_size).sum(-1).mean(1)


def _check(args: AttentionArgs, shares: Tensor) -> None:
    check_attention(args)
    if len(args.query) != len(args.seq_lens):
        require(False, "query", args.query, f"one row for each of {len(args.seq_lens)} seq_lens")
    check_shares(args.query, shares)


def check_shares(query: Tensor, shares: Tensor, least: int = 0) -> None:
    """One row for each of `query`, of `least` blocks at least."""
    if shares.dim() != 2 or shares.dtype != torch.float32 or len(shares) != len(query) or shares.stride(1) != 1:
        require(False, "shares", shares, f"({len(query)}, blocks) float32, contiguous,")
    if shares.shape[1] < least:
        require(False, "shares", shares, f"at least {least} blocks wide")

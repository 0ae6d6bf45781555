"""Paged attention for prefill: the new tokens of each request attend to its cached tokens and to each other."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvscope_kernels.attend_tiles import (
    CAUSAL,
    CHUNKED_WINDOW,
    LOG2_E,
    SLIDING_WINDOW,
    VALUE_LIFT,
    attend_tiles,
    first_seen,
)
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.checks import check_attention, require
from kvscope_kernels.decode.bounds import PartBounds, max_cut_runs, part_bounds
from kvscope_kernels.decode.plan import DecodePlan, DecodePlans, SplitBuffers
from kvscope_kernels.decode.plan_kernel import FIRST, ONLY, PART_FIELDS
from kvscope_kernels.dense_attention import attend
from kvscope_kernels.host_lengths import Lengths, similar_groups
from kvscope_kernels.kv_formats import as_kernel_input, kv_format, scale_strides
from kvscope_kernels.kv_gather import gather_kv
from kvscope_kernels.launch import (
    UNBOUNDED,
    DotTiles,
    attention_constants,
    compute_capability,
    fixed_prefill_tiles,
    num_multiprocessors,
    prefill_tiles,
)
from kvscope_kernels.merge_splits import merge_splits
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit_varying, require_triton, tl
from kvscope_kernels.tuning.tile_table import PREFILL, measured_tiles

_CALL_COST_ELEMENTS = 1 << 21  # query * key products that take as long as one more torch call, on one CPU thread
_FIRST = tl.constexpr(FIRST)
_ONLY = tl.constexpr(ONLY)
_FIELDS = tl.constexpr(PART_FIELDS)


def paged_prefill_attention(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    """Compute causal attention of each request's new tokens over its cached tokens and themselves.

    Request b's queries are rows runs.start[b] .. runs.start[b + 1] - 1, the last n tokens of its L = seq_lens[b]. Their
    keys and values must be in the cache already (`kv_write`). Query i of the request has position p = L - n + i. With
    the names of `AttentionArgs`, h' = h // (num_heads / num_kv_heads), and k_j, v_j at position j, which is in block
    block_tables[b, j // block_size] at offset j % block_size:

        s_j = scale * query[i, h] . k_j[h'],             first <= j <= p
        s_j = softcap * tanh(s_j / softcap)              with softcap
        out[i, h] = sum_j exp(s_j) v_j[h'] / (sum_j exp(s_j) + exp(sinks[h]))      the last term with sinks

    first is 0; max(0, p + 1 - w) with w = sliding_window; p // w * w with is_chunked.

    A program handles a tile of queries and all keys that they attend to. For few queries after a long context, the keys
    are split over several programs, as in decode (`max_cut_runs`). Launch parameters depend on bounds, not on
    runs.lengths. Sums are float32. No device data is read on the host. Raises ValueError for unsupported arguments.

    With `runs.is_fixed`, tiles have one size, key tiles start at the same positions for every query and all are masked,
    so that a row is always summed in the same order. Keys are not split then, and long contexts of few requests are
    slow.

    Sources: PagedAttention arXiv 2309.06180; FlashAttention-2 arXiv 2307.08691; query tokens times the heads of one KV
    head as rows of one tile, arXiv 2511.11581; split KV of Flash-Decoding.
    """
    check_prefill(args, runs)
    require_triton()
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    k_scale, v_scale = args.k_scale, args.v_scale
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads, value_dim = v_cache.shape[1:]
    out = args.out_or_new()
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    cache_format = kv_format(k_cache)
    capability = compute_capability(query.device)
    dims = head_dim, value_dim, group, query.element_size()
    tiles = prefill_tiles(
        *dims,
        runs.max_len,
        capability,
        num_runs=num_kv_heads * len(seq_lens),
        multiprocessors=num_multiprocessors(query.device),
        is_quantized=k_scale is not None,
    )
    bounds = None
    if runs.is_fixed:
        tiles = fixed_prefill_tiles(*dims, capability, is_quantized=k_scale is not None)
    else:
        bounds = _split_bounds(args, runs, tiles)
        shape = group, query.element_size(), query.device
        tiles = measured_tiles(PREFILL, tiles, *shape, is_quantized=k_scale is not None, is_cut=bounds is not None)
    split = None if bounds is None else _plan_split(args, runs, tiles, bounds)
    num_parts = len(seq_lens) if split is None else split.plan.bounds.num_parts
    grid = (cdiv(runs.max_len, tiles.tile_m // group), num_kv_heads, num_parts)
    _paged_prefill_attention_kernel[grid](
        query,
        as_kernel_input(k_cache, cache_format),
        as_kernel_input(v_cache, cache_format),
        block_tables,
        runs.start,
        seq_lens,
        args.sinks,
        k_scale,
        v_scale,
        None if split is None else split.plan.parts,
        out,
        None if split is None else split.buffers.partial,
        None if split is None else split.buffers.lse,
        runs.max_len,
        args.scale,
        args.softcap or 1.0,
        args.sliding_window or UNBOUNDED,
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        block_tables.stride(0),
        *out.stride()[:2],
        **attention_constants(group, head_dim, value_dim, block_size, tiles),
        IS_SLIDING=int(args.sliding_window is not None and not args.is_chunked),
        IS_CHUNKED=args.is_chunked,
        KV_FORMAT=cache_format,
        HAS_SOFTCAP=args.softcap is not None,
        HAS_SINKS=args.sinks is not None,
        UPCAST_DOT=is_interpreting(),
        SAME_STRIDES=k_cache.stride()[:2] == v_cache.stride()[:2],
        IS_CUT=split is not None,
        IS_FIXED=runs.is_fixed,
        QUERY_IN_REGISTERS=tiles.query_in_registers,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    if split is not None:
        merge_splits(split.buffers.partial, split.buffers.lse, split.plan.ranges, out, runs.start)
    return out


class _SplitPlan(NamedTuple):
    plan: DecodePlan
    buffers: SplitBuffers


def _split_bounds(args: AttentionArgs, runs: QueryRuns, tiles: DotTiles) -> PartBounds | None:
    """Return the bounds for splitting keys over programs, for sizing buffers, or None if keys are not split."""
    visible, _, programs_each, _ = _extent(args, runs, tiles)
    processors, num_requests = num_multiprocessors(args.query.device), len(args.seq_lens)
    if num_requests > max_cut_runs(runs.max_len, visible, programs_each, processors, tiles.num_warps):
        return None
    return part_bounds(num_requests, visible, programs_each, tiles.tile_n, processors, tiles.num_warps)


def _plan_split(args: AttentionArgs, runs: QueryRuns, tiles: DotTiles, bounds: PartBounds) -> _SplitPlan:
    plans = DecodePlans() if runs.plans is None else runs.plans
    visible, window, programs_each, is_compute_bound = _extent(args, runs, tiles)
    split_arguments = visible, window, programs_each, tiles.tile_n, tiles.num_warps
    plan = plans.plan(args.seq_lens, *split_arguments, is_compute_bound=is_compute_bound, max_cuts=bounds.num_cuts)
    return _SplitPlan(plan, plans.buffers(plan, runs.max_len * args.query.shape[1], args.v_cache.shape[3]))


def _extent(args: AttentionArgs, runs: QueryRuns, tiles: DotTiles) -> tuple[int, int, int, bool]:
    """Return the sizes that determine how a prefill is split.

    Returns:
        Maximum number of visible tokens per request, window of all queries of a request together, programs per part,
            and whether several programs read each key.
    """
    num_heads, (block_size, num_kv_heads, _) = args.query.shape[1], args.v_cache.shape[1:]
    bound = args.block_tables.shape[1] * block_size if args.max_seq_len is None else args.max_seq_len
    window = min((args.sliding_window or UNBOUNDED) + runs.max_len - 1, UNBOUNDED)
    num_tiles = cdiv(runs.max_len, tiles.tile_m * num_kv_heads // num_heads)
    return min(bound, window), window, num_kv_heads * num_tiles, num_tiles > 1


@jit_varying(numbers=("max_queries", "table_stride"), pointers=("block_tables", "query_start", "seq_lens", "parts"))
def _paged_prefill_attention_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    max_queries: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    query_stride_t: tl.tensor,
    query_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    scale_stride_h: tl.tensor,
    table_stride: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_SLIDING: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    IS_CUT: tl.constexpr,
    IS_FIXED: tl.constexpr,
    QUERY_IN_REGISTERS: tl.constexpr,
) -> None:
    """Each program computes TILE_M // GROUP queries of one request with the heads of one KV head, over all tokens that
    they attend to.

    With IS_CUT, a program handles one part of the request's tokens; a request with a single part is written directly to
    `out`. With IS_FIXED, every tile is masked and starts at a multiple of TILE_N.

    Row m of the tile is query m // GROUP, head m % GROUP. The last tiles, which attend to most tokens, start first.
    """
    tile_queries: tl.constexpr = TILE_M // GROUP
    tile_index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2).to(tl.int64)
    request = part
    if IS_CUT:
        request = tl.load(parts + part * _FIELDS).to(tl.int64)
        if request < 0:  # unused part
            return
    query_begin = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - query_begin
    tile_begin = tile_index * tile_queries
    if tile_begin >= num_queries:
        return
    tile_end = tl.minimum(tile_begin + tile_queries, num_queries)
    num_cached = tl.load(seq_lens + request) - num_queries

    row = tl.arange(0, TILE_M)
    row_query = tile_begin + row // GROUP
    present = row_query < tile_end
    token = (query_begin + row_query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    k_dim = tl.arange(0, TILE_D)
    v_dim = tl.arange(0, TILE_V)
    rows = query + token * query_stride_t + head * query_stride_h
    in_query = present[:, None] & (k_dim < HEAD_DIM)[None, :]
    tile = tl.load(rows[:, None] + k_dim[None, :], mask=in_query, other=0.0)
    if UPCAST_DOT:
        tile = tile.to(tl.float32)
    if QUERY_IN_REGISTERS:  # loaded values go to shared memory, computed ones stay in registers
        tile = tl.where(in_query, tile, 0.0)

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    weighted = tl.zeros([TILE_M, TILE_V], tl.float32)
    k_head_scale = k_scale
    v_head_scale = v_scale
    if KV_FORMAT:
        k_head_scale = k_scale + kv_head * scale_stride_h
        v_head_scale = v_scale + kv_head * scale_stride_h
    if HAS_SINKS:  # a token with a zero value, visible to all queries, in the first part
        is_first = not IS_CUT or (tl.load(parts + part * _FIELDS + 3) & _FIRST) != 0
        top = tl.where(is_first, tl.load(sinks + head).to(tl.float32) * LOG2_E, top)
        total = tl.where(is_first, 1.0, total)

    # Whole tiles of tokens that every row sees need no mask. With a window, too few remain for a second loop, as with a
    # chunk that ends within the rows.
    begin = tl.maximum(first_seen(num_cached + tile_begin, window, IS_CHUNKED), 0)
    end = num_cached + tile_end
    seen_by_all = num_cached + tile_begin + 1
    if IS_CUT:
        begin = tl.maximum(begin, tl.load(parts + part * _FIELDS + 1))
        end = tl.minimum(end, tl.load(parts + part * _FIELDS + 2))
        seen_by_all = tl.maximum(tl.minimum(seen_by_all, end), begin)
    edge = begin + (seen_by_all - begin) // TILE_N * TILE_N
    if IS_CHUNKED:
        edge = tl.where(first_seen(num_cached + tile_end - 1, window, True) > begin, begin, edge)
    if IS_SLIDING or IS_FIXED:
        edge = begin
    for masked in tl.static_range(1 if IS_FIXED else IS_SLIDING, 2):
        top, total, weighted, _ = attend_tiles(
            tile,
            top,
            total,
            weighted,
            k_cache + kv_head * k_stride_h,
            v_cache + kv_head * v_stride_h,
            k_head_scale,
            v_head_scale,
            block_tables + request * table_stride,
            edge if masked else begin,
            end if masked else edge,
            num_cached + row_query,
            window,
            scale,
            softcap,
            k_stride_b,
            k_stride_s,
            v_stride_b,
            v_stride_s,
            scale_stride_b,
            scale_stride_s,
            HEAD_DIM,
            VALUE_DIM,
            TILE_D,
            TILE_V,
            TILE_N,
            BLOCK_SIZE,
            KV_FORMAT,
            (CHUNKED_WINDOW if IS_CHUNKED else SLIDING_WINDOW if IS_SLIDING or IS_CUT else CAUSAL) if masked else 0,
            not masked,
            HAS_SOFTCAP,
            UPCAST_DOT,
            SAME_STRIDES,
            ALIGNED=IS_FIXED,
        )

    divisor = tl.where(total > 0.0, total, 1.0)
    result = weighted / divisor[:, None]
    if KV_FORMAT:
        result = result * (1.0 / VALUE_LIFT)
    in_out = present[:, None] & (v_dim < VALUE_DIM)[None, :]
    if IS_CUT and (tl.load(parts + part * _FIELDS + 3) & _ONLY) == 0:
        index = (part * max_queries + row_query) * (tl.num_programs(1) * GROUP) + head
        tl.store(partial + index[:, None] * VALUE_DIM + v_dim[None, :], result, mask=in_out)
        tl.store(partial_lse + index, top + tl.log2(divisor), mask=present)
    else:
        rows = out + token * out_stride_t + head * out_stride_h
        tl.store(rows[:, None] + v_dim[None, :], result.to(out.dtype.element_ty), mask=in_out)


def paged_prefill_attention_torch(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    """Reference of `paged_prefill_attention`, and the implementation on a CPU for arguments that C does not support.

    Reads lengths on the host and ignores the bounds. Requests with a similar amount of work are padded and run
    together; there is no loop over requests, blocks or tokens.
    """
    check_prefill(args, runs)
    query, block_tables = args.query, args.block_tables
    out = args.out_or_new()
    starts = runs.start.cpu().numpy().astype(np.int64)
    num_queries = np.diff(starts)
    end = args.seq_lens.cpu().numpy().astype(np.int64)
    first = args.first_seen(end - num_queries)
    call_cost = _CALL_COST_ELEMENTS // (query.shape[1] * query.shape[2])
    for rows in similar_groups(num_queries * (end - first), call_cost):
        if not num_queries[rows].any():
            continue
        if len(rows) * num_queries[0] == len(query) and bool((num_queries == num_queries[0]).all()):
            equal_runs = query.view(len(rows), -1, *query.shape[1:])
            return out.copy_(_attend_rows(args._replace(query=equal_runs), num_queries, first, end).flatten(0, 1))
        index = np.arange(num_queries[rows].max())
        token = torch.from_numpy(starts[rows, None] + index)
        present = torch.from_numpy(index < num_queries[rows, None])
        padded = query[token.clamp_(max=len(query) - 1)]
        part = args._replace(query=padded, block_tables=block_tables[torch.from_numpy(rows)])
        result = _attend_rows(part, num_queries[rows], first[rows], end[rows])
        out[token[present]] = result[present]
    return out


def _attend_rows(args: AttentionArgs, num_queries: Lengths, first: Lengths, end: Lengths) -> Tensor:
    """Compute attention for one padded group: query (n, max_queries, num_heads, head_dim) over positions
    [first, end) of each request.
    """
    query, window = args.query, args.sliding_window
    n, max_queries, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = args.v_cache.shape[2:]
    kv = gather_kv(args.cache, args.block_tables, first, end, query.dtype)
    tile = query.view(n, max_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    tile = tile.permute(0, 2, 3, 1, 4)
    from_start = bool((num_queries == end).all())
    sees_all = window is None or int(end.max()) <= window
    is_causal = from_start and sees_all and args.softcap is None and args.sinks is None
    hidden = None
    if not is_causal:
        hidden = _hidden_mask(args, end - num_queries, kv.base, max_queries, kv.keys.shape[1]).to(query.device)
    arguments = tile, kv.keys, kv.values, hidden
    result = attend(*arguments, scale=args.scale, softcap=args.softcap, sinks=args.sinks, is_causal=is_causal)
    return result.permute(0, 3, 1, 2, 4).reshape(n, max_queries, num_heads, value_dim)


def _hidden_mask(args: AttentionArgs, num_before: Lengths, base: Lengths, max_queries: int, num_tokens: int) -> Tensor:
    """Return (n, max_queries, num_tokens) bool: whether each token, from `base` on, is hidden from each query.

    `num_before` tokens precede the first query. Padding needs no mask: it comes after every valid query, and rows of
    padded queries, which are dropped, see zeros.
    """
    query = num_before[:, None, None] + np.arange(max_queries)[:, None]
    token = base[:, None, None] + np.arange(num_tokens)
    hidden = token > query
    if args.sliding_window is not None:
        hidden |= token < args.first_seen(query)
    return torch.from_numpy(hidden)


def check_prefill(args: AttentionArgs, runs: QueryRuns) -> None:
    check_attention(args)
    num_requests = len(args.seq_lens)
    if runs.start.shape != (num_requests + 1,) or runs.start.dtype != torch.int32:
        require(False, "query_start", runs.start, f"({num_requests + 1},) int32")
    if runs.max_len < 1 and len(args.query):
        require(False, "max_query_len", runs.max_len, "at least 1")
    if not args.scale > 0:
        require(False, "scale", args.scale, "above 0")

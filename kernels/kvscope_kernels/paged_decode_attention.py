"""Paged attention for decode: one new token of each request attends to the request's cached keys and values."""

import numpy as np
import torch
from torch import Tensor

from kvscope_kernels.attend_tiles import LOG2_E, VALUE_LIFT, attend_tiles
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_scores.block_attention import block_attention_torch
from kvscope_kernels.checks import check_attention, require
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.decode.plan_kernel import FIRST, ONLY, PART_FIELDS
from kvscope_kernels.dense_attention import attend
from kvscope_kernels.host_lengths import Lengths, similar_groups
from kvscope_kernels.kv_formats import as_kernel_input, kv_format, scale_strides
from kvscope_kernels.kv_gather import gather_kv
from kvscope_kernels.launch import UNBOUNDED, attention_constants, decode_tiles
from kvscope_kernels.merge_splits import block_sum_spec, merge_splits, share_buffers
from kvscope_kernels.triton_language import is_interpreting, jit_varying, require_triton, tl
from kvscope_kernels.tuning.tile_table import DECODE, measured_tiles

_CALL_COST_ELEMENTS = 1 << 17  # elements read in the time of one more torch call, on one CPU thread
_FIRST = tl.constexpr(FIRST)
_ONLY = tl.constexpr(ONLY)
_FIELDS = tl.constexpr(PART_FIELDS)


def paged_decode_attention(
    args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None
) -> Tensor:
    """Compute attention of one query token per request over the request's blocks.

    With the names of `AttentionArgs`, L = seq_lens[b], h' = h // (num_heads / num_kv_heads), and k_j, v_j at position
    j, which is in block block_tables[b, j // block_size] at offset j % block_size:

        s_j = scale * query[b, h] . k_j[h'],             first <= j < L
        s_j = softcap * tanh(s_j / softcap)              with softcap
        out[b, h] = sum_j exp(s_j) v_j[h'] / (sum_j exp(s_j) + exp(sinks[h]))      the last term with sinks

    and zeros if L is 0. first is 0; max(0, L - w) with w = sliding_window; (L - 1) // w * w with is_chunked.

    Sums are float32. No device data is read on the host, so that CUDA graphs can capture it; seq_lens and block_tables
    may change between replays, up to max_seq_len.

    Args:
        args: Queries, cache and options.
        plans: Plans of the step. Layers that get the same object, and the same unchanged seq_lens, share the split of
            requests, which takes one launch. If None, new plans are created for the call.
        shares: None, or a tensor to which the attention shares of blocks are added, as in `block_attention_torch`, in
            the same pass: each tile stores the sum of its weights per block, or per piece of a block longer than a
            tile, and the merge computes the shares. Results are deterministic. Requests beyond the capacity of the
            block sums get nothing.

    Raises:
        ValueError: Unsupported arguments.

    Sources: PagedAttention arXiv 2309.06180; split KV length of Flash-Decoding; a work list of bounded length, planned
    from the lengths, of FlashInfer (arXiv 2501.01005); query heads of one KV head as rows of one tile, arXiv
    2511.11581.
    """
    check_decode(args)
    require_triton()
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    k_scale, v_scale = args.k_scale, args.v_scale
    batch, num_heads, head_dim = query.shape
    block_size, num_kv_heads, value_dim = v_cache.shape[1:]
    out = query.new_empty(batch, num_heads, value_dim) if args.out is None else args.out
    if batch == 0:
        return out
    cache_format = kv_format(k_cache)
    group, is_quantized = num_heads // num_kv_heads, k_scale is not None
    tiles = decode_tiles(head_dim, value_dim, group, query.element_size(), is_quantized=is_quantized)
    bound = block_tables.shape[1] * block_size if args.max_seq_len is None else args.max_seq_len
    window = args.sliding_window or UNBOUNDED
    plans = DecodePlans() if plans is None else plans
    split_arguments = num_kv_heads, tiles.tile_n, tiles.num_warps
    tiles = measured_tiles(DECODE, tiles, group, query.element_size(), query.device, is_quantized=is_quantized)
    max_visible = min(bound, window)
    sum_spec = block_sum_spec(args, shares, max_visible, tiles.tile_n)
    plan = plans.plan(seq_lens, max_visible, window, *split_arguments, *sum_spec[:2], is_chunked=args.is_chunked)
    buffers, measured = (
        plans.buffers(plan, num_heads, value_dim),
        share_buffers(plans, plan, sum_spec, num_heads, shares),
    )
    _paged_decode_attention_kernel[(plan.bounds.num_parts * num_kv_heads,)](
        query,
        as_kernel_input(k_cache, cache_format),
        as_kernel_input(v_cache, cache_format),
        block_tables,
        plan.parts,
        args.sinks,
        k_scale,
        v_scale,
        out,
        buffers.partial,
        buffers.lse,
        None if measured is None else plan.sum_offsets,
        None if measured is None else measured.sums.piece_sums,
        None if measured is None else measured.sums.lse,
        args.scale,
        args.softcap or 1.0,
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        block_tables.stride(0),
        *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        **attention_constants(num_heads // num_kv_heads, head_dim, value_dim, block_size, tiles),
        PIECE=sum_spec.piece,
        KV_FORMAT=cache_format,
        HAS_SOFTCAP=args.softcap is not None,
        HAS_SINKS=args.sinks is not None,
        UPCAST_DOT=is_interpreting(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    if plan.bounds.num_cuts or measured is not None:
        merge_splits(buffers.partial, buffers.lse, plan.ranges, out, measured=measured)
    return out


@jit_varying(numbers=("table_stride",), pointers=("block_tables", "parts", "sum_offsets"))
def _paged_decode_attention_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    parts: tl.tensor,
    sinks: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    sum_offsets: tl.tensor,
    piece_sums: tl.tensor,
    part_lse: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """Each program computes the query heads of one KV head of a request, over one part of its visible tokens.

    The rows of the tile are these heads. A request with one part is written directly to `out`.
    """
    row = tl.arange(0, TILE_M)
    k_dim = tl.arange(0, TILE_D)
    v_dim = tl.arange(0, TILE_V)
    in_query = (row < GROUP)[:, None] & (k_dim < HEAD_DIM)[None, :]
    in_out = (row < GROUP)[:, None] & (v_dim < VALUE_DIM)[None, :]
    part = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.load(parts + part * _FIELDS).to(tl.int64)
    if request < 0:  # unused part
        return
    begin = tl.load(parts + part * _FIELDS + 1)
    end = tl.load(parts + part * _FIELDS + 2)
    flags = tl.load(parts + part * _FIELDS + 3)
    head = kv_head * GROUP + row
    rows = query + request * query_stride_t + head[:, None] * query_stride_h
    tile = tl.load(rows + k_dim[None, :], mask=in_query, other=0.0)
    if UPCAST_DOT:
        tile = tile.to(tl.float32)

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    weighted = tl.zeros([TILE_M, TILE_V], tl.float32)
    k_head_scale = k_scale
    v_head_scale = v_scale
    if KV_FORMAT:
        k_head_scale = k_scale + kv_head * scale_stride_h
        v_head_scale = v_scale + kv_head * scale_stride_h
    if HAS_SINKS:  # a token with a zero value, in the first part
        sink = tl.load(sinks + head, mask=row < GROUP, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where((flags & _FIRST) != 0, sink, top)
        total = tl.where((flags & _FIRST) != 0, 1.0, total)
    sums = piece_sums
    num_kept = GROUP
    if PIECE:  # sums of the part's blocks, from its first tile on
        sum_offset = tl.load(sum_offsets + part).to(tl.int64)
        first_piece = sum_offset * (BLOCK_SIZE // PIECE) + begin % BLOCK_SIZE // PIECE
        sums = piece_sums + first_piece * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        num_kept = tl.where(sum_offset >= 0, GROUP, 0)
    top, total, weighted, own_total = attend_tiles(
        tile,
        top,
        total,
        weighted,
        k_cache + kv_head * k_stride_h,
        v_cache + kv_head * v_stride_h,
        k_head_scale,
        v_head_scale,
        block_tables + request * table_stride,
        begin,
        end,
        row,
        0,
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
        False,
        False,
        HAS_SOFTCAP,
        UPCAST_DOT,
        False,
        sums,
        num_kept,
        NUM_KV_HEADS * GROUP,
        PIECE,
    )
    if PIECE:
        lse_pointers = part_lse + part * (NUM_KV_HEADS * GROUP) + head
        tl.store(lse_pointers, top + tl.log2(own_total), mask=row < GROUP)

    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]  # zeros for a request without tokens
    if KV_FORMAT:
        result = result * (1.0 / VALUE_LIFT)
    if (flags & _ONLY) != 0:
        rows = out + request * out_stride_t + head[:, None] * out_stride_h
        tl.store(rows + v_dim[None, :], result.to(out.dtype.element_ty), mask=in_out)
    else:
        index = part * (NUM_KV_HEADS * GROUP) + head
        tl.store(partial + index[:, None] * VALUE_DIM + v_dim[None, :], result, mask=in_out)
        tl.store(partial_lse + index, top + tl.log2(total), mask=row < GROUP)


def paged_decode_attention_torch(
    args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None
) -> Tensor:
    """Reference of `paged_decode_attention`, and the implementation for CPUs without C.

    Reads lengths on the host; ignores `max_seq_len` and `plans`. Requests of similar length are gathered and run
    together; there is no loop over requests, blocks or tokens.
    """
    check_decode(args)
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    out = args.out_or_new()
    if shares is not None:
        block_attention_torch(args, shares)
    end = seq_lens.cpu().numpy().astype(np.int64)
    first = args.first_seen(end - 1)
    call_cost = _CALL_COST_ELEMENTS // (k_cache.shape[2] * (k_cache.shape[3] + v_cache.shape[3]))
    for rows in similar_groups(end - first, call_cost):
        if len(rows) == len(end):
            return out.copy_(_attend_rows(args, first, end))
        selected = torch.from_numpy(rows)
        part = args._replace(query=query[selected], block_tables=block_tables[selected])
        out[selected] = _attend_rows(part, first[rows], end[rows])
    return out


def _attend_rows(args: AttentionArgs, first: Lengths, end: Lengths) -> Tensor:
    """Compute attention for one padded group: query (n, num_heads, head_dim) over positions [first, end) of
    each request.
    """
    n, num_heads, head_dim = args.query.shape
    num_kv_heads, value_dim = args.v_cache.shape[2:]
    if not end.any():
        return args.query.new_zeros(n, num_heads, value_dim)
    kv = gather_kv(args.cache, args.block_tables, first, end, args.query.dtype)
    hidden = kv.padding
    if hidden is not None and not end.all():
        hidden[torch.from_numpy(end == 0), 0] = False  # see one zeroed value: the result without tokens is zero
    tile = args.query.reshape(n, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
    mask = None if hidden is None else hidden[:, None]
    result = attend(tile, kv.keys, kv.values, mask, scale=args.scale, softcap=args.softcap, sinks=args.sinks)
    return result.reshape(n, num_heads, value_dim)


def check_decode(args: AttentionArgs) -> None:
    check_attention(args)
    if len(args.query) != len(args.seq_lens):
        require(False, "query", args.query, f"one row for each of {len(args.seq_lens)} seq_lens")

"""Paged attention over latents (MLA): all query heads share one key per token, whose first dimensions are the value."""

from typing import NamedTuple

from torch import Tensor

from kvscope_kernels.attend_tiles import LOG2_E, VALUE_LIFT
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.checks import require
from kvscope_kernels.decode.bounds import max_cut_runs
from kvscope_kernels.decode.plan import DecodePlan, DecodePlans, SplitBuffers
from kvscope_kernels.decode.plan_kernel import ONLY, PART_FIELDS
from kvscope_kernels.kv_formats import as_kernel_input, kv_format, scale_strides, widen
from kvscope_kernels.latent_blocks import plain_latents
from kvscope_kernels.launch import (
    UNBOUNDED,
    LatentTiles,
    compute_capability,
    latent_tiles,
    num_multiprocessors,
    padded_dim,
)
from kvscope_kernels.merge_splits import ShareBuffers, block_sum_spec, merge_splits, share_buffers
from kvscope_kernels.paged_decode_attention import check_decode, paged_decode_attention_torch
from kvscope_kernels.paged_prefill_attention import check_prefill, paged_prefill_attention_torch
from kvscope_kernels.triton_language import cdiv, fast_log2, is_interpreting, jit_varying, require_triton, tl

_ONLY = tl.constexpr(ONLY)
_FIELDS = tl.constexpr(PART_FIELDS)


def latent_decode(args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None) -> Tensor:
    """Run `paged_decode_attention` for one KV head whose values are the first dimensions of its keys. Each key is
    loaded once.

    Query heads are the rows of one or more tiles. No device data is read on the host.

    Args:
        args: As for `paged_decode_attention`, without window, softcap and sinks; v_cache is k_cache[..., :value_dim].
            For an 8-bit cache, v_scale is the scale of latents, and k_scale the scale of the remaining dimensions of
            keys.
        plans: As for `paged_decode_attention`.
        shares: As for `paged_decode_attention`.

    Raises:
        ValueError: Unsupported arguments.

    Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with absorbed projections; FlashMLA for the use of a latent
    tile as keys and as values.
    """
    check_decode(args)
    _check_latents(args)
    require_triton()
    out = args.out_or_new()
    batch, num_heads, _ = args.query.shape
    if batch == 0:
        return out
    value_dim = args.v_cache.shape[3]
    element_bytes, capability = args.query.element_size(), compute_capability(args.query.device)
    tiles = latent_tiles(num_heads, element_bytes, capability, is_quantized=args.k_scale is not None)
    plans = DecodePlans() if plans is None else plans
    programs_each = cdiv(num_heads, tiles.tile_m)
    sum_spec = block_sum_spec(args, shares, _max_seq_len(args), tiles.tile_n)
    plan = plans.plan(
        args.seq_lens, _max_seq_len(args), UNBOUNDED, programs_each, tiles.tile_n, tiles.num_warps, *sum_spec[:2]
    )
    split, measured = (
        _SplitPlan(plan, plans.buffers(plan, num_heads, value_dim)),
        share_buffers(plans, plan, sum_spec, num_heads, shares),
    )
    _launch(args, out, None, 1, tiles, split, measured)
    if plan.bounds.num_cuts or measured is not None:
        merge_splits(split.buffers.partial, split.buffers.lse, plan.ranges, out, measured=measured)
    return out


def latent_prefill(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    """Run `paged_prefill_attention` for latents.

    Row m of a request's tiles is query m // num_heads, head m % num_heads. Meant for few queries per request: for many,
    attention over expanded keys takes fewer multiplications.
    """
    check_prefill(args, runs)
    _check_latents(args)
    require_triton()
    out = args.out_or_new()
    num_tokens, num_heads, _ = args.query.shape
    if num_tokens == 0:
        return out
    value_dim = args.v_cache.shape[3]
    element_bytes, capability = args.query.element_size(), compute_capability(args.query.device)
    is_quantized = args.k_scale is not None
    tiles = latent_tiles(num_heads * runs.max_len, element_bytes, capability, is_quantized=is_quantized)
    programs_each = cdiv(runs.max_len * num_heads, tiles.tile_m)
    processors = num_multiprocessors(args.query.device)
    split = None
    if len(args.seq_lens) <= max_cut_runs(runs.max_len, _max_seq_len(args), programs_each, processors, tiles.num_warps):
        plans = DecodePlans() if runs.plans is None else runs.plans
        shape = _max_seq_len(args), UNBOUNDED, programs_each, tiles.tile_n, tiles.num_warps
        plan = plans.plan(args.seq_lens, *shape, is_compute_bound=programs_each > 1)
        split = _SplitPlan(plan, plans.buffers(plan, runs.max_len * num_heads, value_dim))
    _launch(args, out, runs.start, runs.max_len, tiles, split)
    if split is not None and split.plan.bounds.num_cuts:
        merge_splits(split.buffers.partial, split.buffers.lse, split.plan.ranges, out, runs.start)
    return out


class _SplitPlan(NamedTuple):
    plan: DecodePlan
    buffers: SplitBuffers


def _max_seq_len(args: AttentionArgs) -> int:
    bound = args.block_tables.shape[1] * args.k_cache.shape[1]
    return bound if args.max_seq_len is None else args.max_seq_len


def _check_latents(args: AttentionArgs) -> None:
    k_cache, v_cache = args.k_cache, args.v_cache
    if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride() or k_cache.shape[2] != 1:
        require(False, "v_cache", v_cache, "the first numbers of k_cache, of one head,")
    if v_cache.shape[3] >= k_cache.shape[3]:
        require(False, "k_cache", k_cache, "wider than v_cache")
    for name in ("sliding_window", "softcap", "sinks"):
        require(getattr(args, name) is None, name, getattr(args, name), "None, with latents,")


def _launch(
    args: AttentionArgs,
    out: Tensor,
    start: Tensor | None,
    max_queries: int,
    tiles: LatentTiles,
    split: _SplitPlan | None,
    measured: ShareBuffers | None = None,
) -> None:
    query, k_cache, cache_format = args.query, args.k_cache, kv_format(args.k_cache)
    num_heads, head_dim = query.shape[1:]
    num_parts = len(args.seq_lens) if split is None else split.plan.bounds.num_parts
    _paged_latent_attention_kernel[(cdiv(max_queries * num_heads, tiles.tile_m), num_parts)](
        query,
        as_kernel_input(k_cache, cache_format),
        args.block_tables,
        start,
        args.seq_lens,
        args.k_scale,
        args.v_scale,
        None if split is None else split.plan.parts,
        out,
        None if split is None else split.buffers.partial,
        None if split is None else split.buffers.lse,
        None if measured is None else measured.plan.sum_offsets,
        None if measured is None else measured.sums.piece_sums,
        None if measured is None else measured.sums.lse,
        max_queries,
        args.scale,
        *query.stride()[:2],
        *k_cache.stride()[:2],
        *scale_strides(args.k_scale)[:2],
        args.block_tables.stride(0),
        *out.stride()[:2],
        **latent_constants(num_heads, args.v_cache.shape[3], head_dim, k_cache.shape[1], tiles),
        PIECE=0 if measured is None else measured.sum_spec.piece,
        KV_FORMAT=cache_format,
        UPCAST_DOT=is_interpreting(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def latent_constants(
    num_heads: int, latent_dim: int, head_dim: int, block_size: int, tiles: LatentTiles
) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": head_dim - latent_dim,
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "TILE_L": padded_dim(latent_dim),
        "TILE_R": padded_dim(head_dim - latent_dim),
        "BLOCK_SIZE": block_size,
    }


@jit_varying(
    numbers=("max_queries", "table_stride"),
    pointers=("block_tables", "query_start", "seq_lens", "parts", "sum_offsets"),
)
def _paged_latent_attention_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    sum_offsets: tl.tensor,
    piece_sums: tl.tensor,
    part_lse: tl.tensor,
    max_queries: tl.tensor,
    scale: tl.tensor,
    query_stride_t: tl.tensor,
    query_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    table_stride: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """Each program computes TILE_M rows of one request, each a query and a head, over all tokens that they attend to,
    or over one part of them.

    Without `query_start`, a request has one query. Other tiles of a request read the same tokens, which are then in the
    device's cache.
    """
    request = tl.program_id(1).to(tl.int64)
    if parts is not None:
        request = tl.load(parts + request * _FIELDS).to(tl.int64)
        if request < 0:  # unused part
            return
    first_token = request
    num_queries = 1
    if query_start is not None:
        first_token = tl.load(query_start + request).to(tl.int64)
        num_queries = (tl.load(query_start + request + 1) - first_token).to(tl.int32)
    seq_len = tl.load(seq_lens + request)
    tile_begin = tl.program_id(0) * TILE_M
    if tile_begin >= num_queries * NUM_HEADS:
        return
    row = tile_begin + tl.arange(0, TILE_M)
    row_query = row // NUM_HEADS
    head = row % NUM_HEADS
    present = row_query < num_queries
    position_of_row = seq_len - num_queries + row_query
    last_query = tl.minimum((tile_begin + TILE_M - 1) // NUM_HEADS, num_queries - 1)
    begin = 0
    end = seq_len - num_queries + last_query + 1
    is_only = True
    if parts is not None:
        part = parts + tl.program_id(1).to(tl.int64) * _FIELDS
        begin = tl.load(part + 1)
        end = tl.minimum(end, tl.load(part + 2))
        is_only = (tl.load(part + 3) & _ONLY) != 0

    latent_dim = tl.arange(0, TILE_L)
    rotary_dim = tl.arange(0, TILE_R)
    rows = query + (first_token + row_query) * query_stride_t + head * query_stride_h
    in_latent = present[:, None] & (latent_dim < LATENT_DIM)[None, :]
    in_rotary = present[:, None] & (rotary_dim < ROTARY_DIM)[None, :]
    latent_query = tl.load(rows[:, None] + latent_dim[None, :], mask=in_latent, other=0.0)
    rotary_query = tl.load(rows[:, None] + (LATENT_DIM + rotary_dim)[None, :], mask=in_rotary, other=0.0)
    if UPCAST_DOT:
        latent_query = latent_query.to(tl.float32)
        rotary_query = rotary_query.to(tl.float32)

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    weighted = tl.zeros([TILE_M, TILE_L], tl.float32)
    table = block_tables + request * table_stride
    factor = scale * LOG2_E
    if PIECE:
        piece = tl.arange(0, TILE_N // PIECE)
        sum_offset = tl.load(sum_offsets + tl.program_id(1)).to(tl.int64)
        sums = piece_sums + sum_offset * (BLOCK_SIZE // PIECE * NUM_HEADS)
        num_kept = tl.where(sum_offset >= 0, NUM_HEADS, 0)
    for start in range(begin, end, TILE_N):
        position = start + tl.arange(0, TILE_N)
        inside = position < end
        unsigned_position = position.to(tl.uint32)
        block = tl.load(table + unsigned_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = (unsigned_position % BLOCK_SIZE).to(tl.int32)
        tokens = k_cache + block * k_stride_b + offset * k_stride_s
        in_key = inside[:, None] & (latent_dim < LATENT_DIM)[None, :]
        in_rotary_key = inside[:, None] & (rotary_dim < ROTARY_DIM)[None, :]
        latent = tl.load(tokens[:, None] + latent_dim[None, :], mask=in_key, other=0.0)
        rotary = tl.load(tokens[:, None] + (LATENT_DIM + rotary_dim)[None, :], mask=in_rotary_key, other=0.0)
        if KV_FORMAT:
            scale_offset = block * scale_stride_b + offset * scale_stride_s
            rotary_factor = tl.load(k_scale + scale_offset, mask=inside, other=0.0)
            latent_factor = tl.load(v_scale + scale_offset, mask=inside, other=0.0)
            latent = widen(latent, latent_query.dtype, KV_FORMAT)
            rotary = widen(rotary, latent_query.dtype, KV_FORMAT)
        if UPCAST_DOT:
            latent = latent.to(tl.float32)
            rotary = rotary.to(tl.float32)
        score = tl.dot(rotary_query, tl.trans(rotary), input_precision="ieee")
        if KV_FORMAT:
            latent_score = tl.dot(latent_query, tl.trans(latent), input_precision="ieee")
            score = score * rotary_factor[None, :] + latent_score * latent_factor[None, :]
        else:
            score = tl.dot(latent_query, tl.trans(latent), score, input_precision="ieee")
        visible = inside[None, :] & (position[None, :] <= position_of_row[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no visible token yet: -inf - -inf would be NaN
        shrink = tl.exp2(top - finite_top)
        weight = tl.exp2(score * factor - finite_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if PIECE:
            sums_of_pieces = tl.sum(tl.reshape(weight, [TILE_M, TILE_N // PIECE, PIECE]), 2)
            sums_offset = ((start - begin) // PIECE + piece)[None, :] * NUM_HEADS + row[:, None]
            is_stored = (row < num_kept)[:, None] & (start + piece * PIECE < end)[None, :]
            tl.store(sums + sums_offset, finite_top[:, None] + fast_log2(sums_of_pieces, UPCAST_DOT), mask=is_stored)
        if KV_FORMAT:
            weight = weight * (latent_factor * VALUE_LIFT)[None, :]
        weighted = tl.dot(weight.to(latent.dtype), latent, weighted * shrink[:, None], input_precision="ieee")
        top = new_top

    if PIECE:
        lse_pointers = part_lse + tl.program_id(1).to(tl.int64) * NUM_HEADS + row
        tl.store(lse_pointers, top + tl.log2(total), mask=present)
    divisor = tl.where(total > 0.0, total, 1.0)
    result = weighted / divisor[:, None]
    if KV_FORMAT:
        result = result * (1.0 / VALUE_LIFT)
    if is_only:
        rows = out + (first_token + row_query) * out_stride_t + head * out_stride_h
        tl.store(rows[:, None] + latent_dim[None, :], result.to(out.dtype.element_ty), mask=in_latent)
    else:
        index = tl.program_id(1).to(tl.int64) * (max_queries * NUM_HEADS) + row
        tl.store(partial + index[:, None] * LATENT_DIM + latent_dim[None, :], result, mask=in_latent)
        tl.store(partial_lse + index, top + tl.log2(divisor), mask=present)


def latent_decode_torch(args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None) -> Tensor:
    """Reference of `latent_decode`, and the implementation on a CPU for arguments that C does not support."""
    return paged_decode_attention_torch(plain_latents(args), plans, shares)


def latent_prefill_torch(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    return paged_prefill_attention_torch(plain_latents(args), runs)

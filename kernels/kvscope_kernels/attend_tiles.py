"""Inner loop of decode and prefill: attention of one tile of queries to a range of cached tokens.

Online softmax in base 2 (FlashAttention, arXiv 2205.14135). The block table is looked up per token, so that the tile
size does not depend on the block size (arXiv 2511.11581).
"""

from kvscope_kernels.kv_formats import widen
from kvscope_kernels.triton_language import fast_log2, jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)
CAUSAL = tl.constexpr(1)
SLIDING_WINDOW = tl.constexpr(2)
CHUNKED_WINDOW = tl.constexpr(3)
VALUE_LIFT = tl.constexpr(128.0)
"""Factor by which `weighted` in `attend_tiles` is scaled up with a quantized cache.

The value's scale, about max|value| / 127, is multiplied into the softmax weight before that is rounded to the dtype of
the query. In float16, the product of a small weight and a scale would be subnormal (below 6e-5) and lose precision.
"""


@jit
def first_seen(position: tl.tensor, window: tl.tensor, IS_CHUNKED: tl.constexpr) -> tl.tensor:
    """Return the first position that a query at `position` attends to; may be negative. See
    `AttentionArgs.is_chunked`.
    """
    return position // window * window if IS_CHUNKED else position + 1 - window


@jit
def attend_tiles(
    query: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    row_position: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_s: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    SAME_STRIDES: tl.constexpr = False,
    sums: tl.tensor = None,
    num_kept: tl.tensor = None,
    SUMS_STRIDE: tl.constexpr = 0,
    PIECE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = False,
) -> tl.tensor:
    """Add tokens [begin, end) to the running softmax (top, total, weighted) of TILE_M query rows.

    With WHOLE_TILES, end - begin is a multiple of TILE_N, and only MASK_ROWS masks anything. Slots outside [begin, end)
    are not read, so their contents, NaN included, have no effect.

    Args:
        query: (TILE_M, TILE_D), zero past HEAD_DIM and in absent rows.
        top: (TILE_M,) float32, the largest score so far, times log2(e); -inf initially.
        total: (TILE_M,) float32, sum of 2^(score - top).
        weighted: (TILE_M, TILE_V) float32, sum of 2^(score - top) * value; times VALUE_LIFT with a quantized cache.
        k_head: Pointer to the head's first key in block 0; v_head likewise; k_scale and v_scale point to the head's
            scales, or are None.
        table: The request's block table.
        row_position: (TILE_M,) position of each query row; read with MASK_ROWS only. CAUSAL masks tokens after a row;
            SLIDING_WINDOW also those at least `window` before it; CHUNKED_WINDOW also those before its chunk of
            `window` tokens. With CAUSAL, each row must attend to a token of the first tile, or of an earlier call. Rows
            at or past `end` are absent.
        scale: Factor by which scores are multiplied, above 0.
        SAME_STRIDES: Whether keys and values have the same strides, so that offsets are computed once.
        sums: Output for log2 of the sum of 2^score over each piece of tokens, for the first `num_kept` rows. Points to
            the piece that contains `begin`; the next piece follows after SUMS_STRIDE numbers.
        PIECE: Number of tokens per piece, which divides TILE_N; tiles then start at pieces. If 0, no sums are stored.
        ALIGNED: Whether tiles start at multiples of TILE_N, whatever `begin` is.

    Returns:
        top, total, weighted, and `total` of this call's tokens only (with PIECE; otherwise total again).
    """
    token = tl.arange(0, TILE_N)
    k_dim = tl.arange(0, TILE_D)
    v_dim = tl.arange(0, TILE_V)
    if MASK_ROWS == CHUNKED_WINDOW:
        row_first = first_seen(row_position, window, True)
    first = begin
    if PIECE:
        first = begin // PIECE * PIECE
        own_total = tl.zeros_like(total)
        piece = tl.arange(0, TILE_N // PIECE)
        row = tl.arange(0, query.shape[0])
    if ALIGNED:
        first = begin // TILE_N * TILE_N
    for start in range(first, end, TILE_N):
        position = start + token
        inside = (position < end) | WHOLE_TILES
        if PIECE or ALIGNED:
            inside = inside & (position >= begin)
        unsigned_position = position.to(tl.uint32)  # unsigned: division needs no rounding towards zero
        block = tl.load(table + unsigned_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = (unsigned_position % BLOCK_SIZE).to(tl.int32)
        k_offset = block * k_stride_b + offset * k_stride_s
        v_offset = k_offset
        if not SAME_STRIDES:
            v_offset = block * v_stride_b + offset * v_stride_s
        k_rows = k_head + k_offset
        v_rows = v_head + v_offset
        in_key = inside[:, None] & (k_dim < HEAD_DIM)[None, :]
        in_value = inside[:, None] & (v_dim < VALUE_DIM)[None, :]
        key = tl.load(k_rows[:, None] + k_dim[None, :], mask=in_key, other=0.0)
        value = tl.load(v_rows[:, None] + v_dim[None, :], mask=in_value, other=0.0)
        if KV_FORMAT:  # scales multiply products: one operation per token instead of one per dimension
            scale_offset = block * scale_stride_b + offset * scale_stride_s
            k_factor = tl.load(k_scale + scale_offset, mask=inside, other=0.0)
            v_factor = tl.load(v_scale + scale_offset, mask=inside, other=0.0) * VALUE_LIFT
            key = widen(key, query.dtype, KV_FORMAT)
            value = widen(value, query.dtype, KV_FORMAT)
        if UPCAST_DOT:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if KV_FORMAT:
            score = score * k_factor[None, :]
        factor = scale * LOG2_E
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities
            score = score * scale
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E) / softcap) + 1.0)) * LOG2_E
            factor = 1.0
        if MASK_ROWS == SLIDING_WINDOW:
            distance = row_position[:, None] - position[None, :]
            visible = inside[None, :] & (distance >= 0) & (distance < window)
            score = tl.where(visible, score, float("-inf"))
        elif MASK_ROWS == CHUNKED_WINDOW:
            is_visible = (position[None, :] <= row_position[:, None]) & (position[None, :] >= row_first[:, None])
            score = tl.where(inside[None, :] & is_visible, score, float("-inf"))
        elif MASK_ROWS == CAUSAL:
            score = tl.where(position[None, :] <= row_position[:, None], score, float("-inf"))
        elif not WHOLE_TILES:
            score = tl.where(inside[None, :], score, float("-inf"))
        # Scale after the maximum, so that a score takes one fused multiply-add and no separate multiplication.
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        # A row may have seen no token yet: -inf - -inf would be NaN.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top) if MASK_ROWS >= SLIDING_WINDOW else new_top
        shrink = tl.exp2(top - finite_top)
        weight = tl.exp2(score * factor - finite_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if PIECE:
            own_total = own_total * shrink + tl.sum(weight, 1)
            sums_of_pieces = tl.sum(tl.reshape(weight, [query.shape[0], TILE_N // PIECE, PIECE]), 2)
            sums_offset = ((start - first) // PIECE + piece)[None, :] * SUMS_STRIDE + row[:, None]
            is_stored = (row < num_kept)[:, None] & (start + piece * PIECE < end)[None, :]
            tl.store(sums + sums_offset, new_top[:, None] + fast_log2(sums_of_pieces, UPCAST_DOT), mask=is_stored)
        if KV_FORMAT:
            weight = weight * v_factor[None, :]
        weighted = tl.dot(weight.to(value.dtype), value, weighted * shrink[:, None], input_precision="ieee")
        top = new_top
    if not PIECE:
        own_total = total
    return top, total, weighted, own_total

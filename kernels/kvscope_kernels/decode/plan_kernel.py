"""Splits a batch into parts by its lengths, on the device, in one launch for all layers of a step."""

from torch import Tensor

from kvscope_kernels.attend_tiles import first_seen
from kvscope_kernels.decode.bounds import MAX_PART_TOKENS, PartBounds
from kvscope_kernels.triton_language import jit, jit_varying, require_triton, tl

PART_FIELDS = 4
"""Number of fields of a part: the request's index, first position, end position (exclusive), and flags."""
FIRST, ONLY = 1, 2
"""Flag bits of a part: whether it is the request's first part, and its only part."""
TILE_B = 256  # requests, or a request's parts, processed at a time
_FIRST = tl.constexpr(FIRST)
_ONLY = tl.constexpr(ONLY)
_FIELDS = tl.constexpr(PART_FIELDS)


def plan_decode(
    seq_lens: Tensor,
    parts: Tensor,
    ranges: Tensor,
    bounds: PartBounds,
    *,
    window: int,
    tile_n: int,
    is_chunked: bool = False,
    sum_offsets: Tensor | None = None,
    block_size: int = 0,
    sum_capacity: int = 0,
) -> None:
    """Split each request's visible tokens into parts of nearly equal length.

    With v_b = min(seq_lens[b], window), or, with `is_chunked`, the request's tokens in its last chunk of `window`
    tokens, T their sum, and ceilings everywhere:

        S   = max(min_tokens, T / num_cuts, min(T / num_filling, MAX_PART_TOKENS));  not bounded if num_cuts is 0
        n_b = max(1, v_b / (v_b / (v_b / S) rounded up to a multiple of tile_n))

    so that the sum of n_b is at most batch + num_cuts for any lengths. A request without tokens is one part.

    With `block_size`, which must divide `tile_n`, v_b counts from the start of the first visible block, and each part
    except a request's first starts at a block.

    Args:
        seq_lens: (batch,) int32.
        parts: Output, (bounds.num_parts, 4) int32, contiguous: see `PART_FIELDS`; unused parts have request -1.
        ranges: Output, (batch, 2) int32, contiguous: each request's first part, and number of parts.
        bounds: Limits of the split, from `part_bounds`.
        window: As for `DecodePlans.plan`.
        tile_n: Tokens per tile.
        is_chunked: As in `AttentionArgs`.
        sum_offsets: Output, (bounds.num_parts,) int32: index of each part's first block in the concatenation of all
            requests' visible blocks; -1 unless all blocks of its request are among the first `sum_capacity`. Not
            computed if None.
        block_size: Size of blocks whose sums are stored; 0 if no sums are stored.
        sum_capacity: Capacity of the block sums, in blocks.
    """
    require_triton()
    _plan_decode_kernel[(len(seq_lens),)](
        seq_lens,
        parts,
        ranges,
        sum_offsets,
        len(seq_lens),
        sum_capacity,
        window,
        bounds.num_parts,
        bounds.num_cuts,
        bounds.num_filling,
        bounds.min_tokens,
        tile_n,
        LONGEST=MAX_PART_TOKENS,
        BLOCK_SIZE=block_size,
        TILE_B=TILE_B,
        IS_CHUNKED=is_chunked,
        num_warps=4,
    )


@jit
def _visible(seq_len: tl.tensor, window: tl.tensor, IS_CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    first = tl.maximum(first_seen(seq_len - 1, window, IS_CHUNKED), 0)
    if BLOCK_SIZE:
        first = first // BLOCK_SIZE * BLOCK_SIZE
    return seq_len - first


@jit
def _split(visible: tl.tensor, longest: tl.tensor, tile_n: tl.tensor) -> tl.tensor:
    """Return the number of parts of a request, and the length of all parts but the last, in int32 without overflow."""
    visible = tl.maximum(visible, 1)
    num_parts = (visible - 1) // longest + 1
    size = ((visible - 1) // num_parts // tile_n + 1) * tile_n
    return (visible - 1) // size + 1, size


@jit_varying(
    numbers=("batch", "sum_capacity", "window", "max_parts", "num_cuts", "num_filling", "min_tokens", "tile_n"),
    pointers=("seq_lens", "parts", "ranges", "sum_offsets"),
)
def _plan_decode_kernel(
    seq_lens: tl.tensor,
    parts: tl.tensor,
    ranges: tl.tensor,
    sum_offsets: tl.tensor,
    batch: tl.tensor,
    sum_capacity: tl.tensor,
    window: tl.tensor,
    max_parts: tl.tensor,
    num_cuts: tl.tensor,
    num_filling: tl.tensor,
    min_tokens: tl.tensor,
    tile_n: tl.tensor,
    LONGEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_B: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
) -> None:
    """Each program plans one request.

    It reads all lengths, for the total and for the number of parts before its own.
    """
    request = tl.program_id(0)
    lane = tl.arange(0, TILE_B)
    sums = tl.zeros([TILE_B], tl.int64)
    for start in range(0, batch, TILE_B):
        lengths = tl.load(seq_lens + start + lane, mask=start + lane < batch, other=0)
        sums += _visible(lengths, window, IS_CHUNKED, BLOCK_SIZE).to(tl.int64)
    total = tl.sum(sums, 0)
    filling = tl.minimum((total + num_filling - 1) // num_filling, LONGEST)
    fitting = (total + num_cuts - 1) // tl.maximum(num_cuts, 1)
    longest = tl.maximum(tl.maximum(filling, fitting), min_tokens)
    longest = tl.where(num_cuts > 0, tl.minimum(longest, 2147483647), 2147483647).to(tl.int32)

    before = tl.zeros([TILE_B], tl.int32)
    if BLOCK_SIZE:
        blocks_before = tl.zeros([TILE_B], tl.int32)
    for start in range(0, request, TILE_B):
        lengths = tl.load(seq_lens + start + lane, mask=start + lane < request, other=0)
        visible = _visible(lengths, window, IS_CHUNKED, BLOCK_SIZE)
        num_parts, _ = _split(visible, longest, tile_n)
        before += tl.where(start + lane < request, num_parts, 0)
        if BLOCK_SIZE:
            blocks_before += (visible + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    base = tl.sum(before, 0)

    seq_len = tl.load(seq_lens + request)
    visible = _visible(seq_len, window, IS_CHUNKED, BLOCK_SIZE)
    num_parts, size = _split(visible, longest, tile_n)
    if BLOCK_SIZE:
        sum_offset = tl.sum(blocks_before, 0)
        fits_sums = sum_offset + (visible + (BLOCK_SIZE - 1)) // BLOCK_SIZE <= sum_capacity
    tl.store(ranges + 2 * request, base)
    tl.store(ranges + 2 * request + 1, num_parts)
    if request == batch - 1:
        for start in range(base + num_parts, max_parts, TILE_B):
            tl.store(parts + (start + lane) * _FIELDS, -1, mask=start + lane < max_parts)
    for start in range(0, num_parts, TILE_B):
        part = start + lane
        at = parts + (base + part) * _FIELDS
        begin = seq_len - visible + part * size
        end = tl.minimum(begin + size, seq_len)
        if BLOCK_SIZE:
            begin = tl.maximum(begin, first_seen(seq_len - 1, window, IS_CHUNKED))
            part_sum_offset = tl.where(fits_sums, sum_offset + part * (size // BLOCK_SIZE), -1)
            tl.store(sum_offsets + base + part, part_sum_offset, mask=part < num_parts)
        flags = tl.where(part == 0, _FIRST, 0) + tl.where(num_parts == 1, _ONLY, 0)
        tl.store(at, request, mask=part < num_parts)
        tl.store(at + 1, begin, mask=part < num_parts)
        tl.store(at + 2, end, mask=part < num_parts)
        tl.store(at + 3, flags, mask=part < num_parts)

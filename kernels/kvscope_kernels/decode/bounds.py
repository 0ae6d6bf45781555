"""Bounds for splitting a batch into parts, known to the host without reading lengths: number and minimum length of
parts.

A part is a range of one request's tokens. The bounds apply to decodes and to short runs of queries after long contexts.
They depend on shapes and the device, never on data; `plan_kernel` splits within these bounds.
"""

from typing import Final, NamedTuple

from kvscope_kernels.triton_language import cdiv

MAX_PART_TOKENS: Final = 1024
"""Maximum number of tokens of one part if there are enough programs, so that a long request does not delay the
batch.
"""
MAX_CUT_QUERIES: Final = 256
"""Maximum number of a request's queries for which its tokens are split into parts. More queries, such as
prompts, have enough programs anyway.
"""
MAX_SUM_BYTES: Final = 48 << 20
"""Maximum bytes of a layer's block sums when attention scores are measured: enough for 6 million tokens in blocks of 16
with 32 heads.
"""
_MIN_PART_TILES: Final = 2
_WARPS_PER_MULTIPROCESSOR: Final = 8
_MAX_FILLS: Final = 4  # maximum of additional parts, in multiples of what fills the device: limits buffers
_NEAR_FULL: Final = 0.95  # accept this share of the best utilization of the last wave: fewer parts to merge


class PartBounds(NamedTuple):
    """Limits of the number and length of the parts into which a batch is split, for each KV head."""

    num_parts: int
    """Maximum number of parts of all requests together: one per request, plus `num_cuts`. Buffers have this size."""
    num_cuts: int
    """Maximum number of parts beyond one per request. If 0, no request is split, and nothing is merged."""
    num_filling: int
    """Number of parts that occupy all multiprocessors of the device."""
    min_tokens: int
    """Minimum number of tokens per part of a split request; a multiple of the tile size."""


def part_bounds(
    batch: int,
    max_visible: int,
    programs_each: int,
    tile_n: int,
    num_processors: int,
    num_warps: int = 4,
    *,
    is_compute_bound: bool = False,
) -> PartBounds:
    """Return the bounds for `batch` requests of up to `max_visible` tokens each.

    A part is long enough that `num_cuts` suffices for any lengths. Otherwise, it is as short as needed to fill the
    device, between `min_tokens` and `MAX_PART_TOKENS`. A batch of short requests that fills the device without a split
    is not split.

    Args:
        batch: Number of requests.
        max_visible: Maximum number of visible tokens per request.
        programs_each: Programs per part, one for each KV head and tile of queries.
        tile_n: Tokens per tile.
        num_processors: Number of multiprocessors of the device.
        num_warps: Warps per program.
        is_compute_bound: Whether several tiles of queries read each key, so that the matmuls limit the speed and not
            reading. The number of parts of a single request is then chosen to fill the device in complete waves.
    """
    num_filling_programs = _programs_that_fill(num_processors, num_warps)
    num_filling_parts = cdiv(num_filling_programs, programs_each)
    min_tokens = _MIN_PART_TILES * tile_n
    is_whole = max_visible <= min_tokens or (max_visible <= MAX_PART_TOKENS and batch >= num_filling_parts)
    num_useful = max(num_filling_parts, batch * cdiv(max_visible, MAX_PART_TOKENS))
    num_possible = batch * cdiv(max(max_visible, 1), min_tokens)
    # Memory-bound parts of one request end together, whatever their number. Those of several requests do not, and
    # smaller parts balance the load.
    num_cuts = 0 if is_whole else min(min(_MAX_FILLS, batch + 1) * num_filling_parts, num_useful, num_possible)
    if is_compute_bound and batch == 1 and num_cuts:
        num_cuts = num_filling_parts = _in_whole_waves(num_cuts, programs_each, num_filling_programs)
    return PartBounds(batch + num_cuts, num_cuts, num_filling_parts, min_tokens)


def max_cut_runs(max_queries: int, max_visible: int, programs_each: int, num_processors: int, num_warps: int) -> int:
    """Return the maximum number of requests, of up to `max_queries` queries each, whose tokens are split; 0 if none
    are.

    Only requests with few queries after a long context are split. More requests, or more queries, fill the device
    without a split.
    """
    is_short = max_queries <= MAX_CUT_QUERIES and max_visible > MAX_PART_TOKENS
    return _programs_that_fill(num_processors, num_warps) // programs_each if is_short else 0


def partial_bytes(bounds: PartBounds, num_rows: int, value_dim: int) -> int:
    """Return the bytes needed for partial results: float32 outputs and their log-sum-exp (`plan.SplitBuffers`)."""
    return 4 * (bounds.num_parts if bounds.num_cuts else 0) * num_rows * (value_dim + 1)


def block_sum_capacity(batch: int, max_visible: int, block_size: int, num_heads: int, pieces_each: int = 1) -> int:
    """Return the capacity of block sums, in blocks, for `batch` requests that attend to up to `max_visible` tokens
    each.

    It covers all possible blocks, up to `MAX_SUM_BYTES`. A window may start and end within blocks.
    """
    return min(batch * (cdiv(max_visible, block_size) + 1), MAX_SUM_BYTES // (4 * num_heads * pieces_each))


def _in_whole_waves(max_parts: int, programs_each: int, num_filling_programs: int) -> int:
    """Return the number of parts, up to `max_parts`, for which the device is idle least in the last wave of programs.

    Example: an H200 took 168 us for 64 queries after 32k tokens in 18 parts: 576 programs, of which 264 run at a time,
    in three waves with 73 % utilization.
    """
    shares = [
        count * programs_each / (cdiv(count * programs_each, num_filling_programs) * num_filling_programs)
        for count in range(1, max_parts + 1)
    ]
    return next(count for count, share in enumerate(shares, 1) if share >= _NEAR_FULL * max(shares))


def _programs_that_fill(num_processors: int, num_warps: int) -> int:
    return max(1, _WARPS_PER_MULTIPROCESSOR // num_warps) * num_processors

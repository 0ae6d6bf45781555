"""What the host knows of parts before the lengths are read: how many there may be, how long at least. Those of decodes,
and of short runs of queries behind long contexts, which are cut alike.

Decides from shapes and the device, never from data; `plan_kernel` cuts within these bounds.
"""

from typing import Final, NamedTuple

from kvscope_kernels.triton_language import cdiv

LONGEST_PART: Final = 1024
"""Tokens that one program takes at most where there are programs enough, so that a long request cannot hold up the
batch."""
MAX_CUT_QUERIES: Final = 256
"""Of a run that is cut: longer ones, prompts and chunks of them, are programs enough."""
MAX_SUM_BYTES: Final = 48 << 20
"""Of the sums of a layer's blocks, where it is measured what attention falls on: with 32 heads those of 6 million
tokens in blocks of 16."""
_MIN_PART_TILES: Final = 2
_WARPS_PER_MULTIPROCESSOR: Final = 8
_MAX_FILLS: Final = 4  # parts beyond one a request, in fills of the device: bounds the room for partial results
_NEAR_FULL: Final = 0.95  # of the most that parts fill of their last round: fewer parts leave less to be merged


class PartBounds(NamedTuple):
    """How a batch may be cut, for each KV head."""

    num_parts: int
    """At most, of all requests: one each, and the cuts. What buffers are made for."""
    num_cuts: int
    """Parts beyond one a request, at most. 0: no request is cut, and nothing has to be merged."""
    num_wanted: int
    """Parts that fill the device."""
    min_tokens: int
    """Of a part of a request that is cut; a multiple of the tile."""


def part_bounds(
    batch: int,
    max_visible: int,
    programs_each: int,
    tile_n: int,
    num_processors: int,
    num_warps: int = 4,
    *,
    reads_again: bool = False,
) -> PartBounds:
    """For `batch` requests of up to `max_visible` tokens each.

    `programs_each`: of a part, one for each KV head and tile of queries.
    `reads_again`: several tiles of queries read each key, so that products take the time, and not reading. The parts of
    one request are then as many as fill the device in whole rounds; without it they are never more than so many.

    A part is as long as it must be for `num_cuts` to suffice whatever the lengths are, and as short as fills the
    device, within [`min_tokens`, `LONGEST_PART`]. A batch that fills it with whole short requests is not cut.
    """
    fill = _programs_that_fill(num_processors, num_warps)
    wanted = cdiv(fill, programs_each)
    min_tokens = _MIN_PART_TILES * tile_n
    is_whole = max_visible <= min_tokens or (max_visible <= LONGEST_PART and batch >= wanted)
    useful = max(wanted, batch * cdiv(max_visible, LONGEST_PART))
    possible = batch * cdiv(max(max_visible, 1), min_tokens)
    # Parts of one request that are bound by reading end together in whatever number; those of several do not, and
    # smaller ones even it out.
    num_cuts = 0 if is_whole else min(min(_MAX_FILLS, batch + 1) * wanted, useful, possible)
    if reads_again and batch == 1 and num_cuts:
        num_cuts = wanted = _in_whole_rounds(num_cuts, programs_each, fill)
    return PartBounds(batch + num_cuts, num_cuts, wanted, min_tokens)


def most_cut_runs(max_queries: int, max_visible: int, programs_each: int, num_processors: int, num_warps: int) -> int:
    """So many requests' runs of up to `max_queries` queries are cut: short ones behind long contexts. More of them fill
    the device by themselves, as prompts do, which are not cut: 0."""
    is_short = max_queries <= MAX_CUT_QUERIES and max_visible > LONGEST_PART
    return _programs_that_fill(num_processors, num_warps) // programs_each if is_short else 0


def partial_bytes(bounds: PartBounds, num_rows: int, value_dim: int) -> int:
    """Of the room for partial results: float32 outputs and their log-sum-exp; see `plan.SplitBuffers`."""
    return 4 * (bounds.num_parts if bounds.num_cuts else 0) * num_rows * (value_dim + 1)


def num_places(batch: int, max_visible: int, block_size: int, num_heads: int, pieces_each: int = 1) -> int:
    """Blocks whose sums are kept, of `batch` requests that see up to `max_visible` tokens each: all that there may be,
    within `MAX_SUM_BYTES`. A window begins and ends within blocks."""
    return min(batch * (cdiv(max_visible, block_size) + 1), MAX_SUM_BYTES // (4 * num_heads * pieces_each))


def _in_whole_rounds(most: int, programs_each: int, fill: int) -> int:
    """Up to `most` parts whose programs leave least of their last round idle. An H200 took 168 us for 64 queries behind
    32k in 18 parts: 576 programs, of which 264 run at once, in three rounds that were filled to 73 %."""
    shares = [count * programs_each / (cdiv(count * programs_each, fill) * fill) for count in range(1, most + 1)]
    return next(count for count, share in enumerate(shares, 1) if share >= _NEAR_FULL * max(shares))


def _programs_that_fill(num_processors: int, num_warps: int) -> int:
    return max(1, _WARPS_PER_MULTIPROCESSOR // num_warps) * num_processors

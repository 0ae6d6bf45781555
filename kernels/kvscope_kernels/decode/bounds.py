"""What the host knows of a decode's parts before the lengths are read: how many there may be, how long at least.

Decides from shapes and the device, never from data; `plan_kernel` cuts within these bounds.
"""

from typing import Final, NamedTuple

from kvscope_kernels.triton_language import cdiv

LONGEST_PART: Final = 1024
"""Tokens that one program takes at most where there are programs enough, so that a long request cannot hold up the
batch."""
_MIN_PART_TILES: Final = 2
_WARPS_PER_MULTIPROCESSOR: Final = 8
_MAX_FILLS: Final = 4  # parts beyond one a request, in fills of the device: bounds the room for partial results


class PartBounds(NamedTuple):
    """How decode may cut a batch, for each KV head."""

    num_parts: int
    """At most, of all requests: one each, and the cuts. What buffers are made for."""
    num_cuts: int
    """Parts beyond one a request, at most. 0: no request is cut, and nothing has to be merged."""
    num_wanted: int
    """Parts that fill the device."""
    min_tokens: int
    """Of a part of a request that is cut; a multiple of the tile."""


def part_bounds(
    batch: int, max_visible: int, num_kv_heads: int, tile_n: int, num_processors: int, num_warps: int = 4
) -> PartBounds:
    """For `batch` requests of up to `max_visible` tokens each.

    A part is as long as it must be for `num_cuts` to suffice whatever the lengths are, and as short as fills the
    device, within [`min_tokens`, `LONGEST_PART`]. A batch that fills it with whole short requests is not cut.
    """
    wanted = cdiv(_WARPS_PER_MULTIPROCESSOR // num_warps * num_processors, num_kv_heads)
    min_tokens = _MIN_PART_TILES * tile_n
    is_whole = max_visible <= min_tokens or (max_visible <= LONGEST_PART and batch >= wanted)
    useful = max(wanted, batch * cdiv(max_visible, LONGEST_PART))
    possible = batch * cdiv(max(max_visible, 1), min_tokens)
    # Parts of one request end together in whatever number; those of several do not, and smaller ones even it out.
    num_cuts = 0 if is_whole else min(min(_MAX_FILLS, batch + 1) * wanted, useful, possible)
    return PartBounds(batch + num_cuts, num_cuts, wanted, min_tokens)


def partial_bytes(bounds: PartBounds, num_heads: int, value_dim: int) -> int:
    """Of the room for partial results: float32 outputs and their log-sum-exp; see `plan.Room`."""
    return 4 * (bounds.num_parts if bounds.num_cuts else 0) * num_heads * (value_dim + 1)

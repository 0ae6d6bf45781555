"""Grouping of (token, expert) pairs by expert into tiles, without synchronization with the host.

All pairs of a tile have the same expert. The number of tiles is known on the device only: the host launches the maximum
number (`max_tiles`), and unused tiles have expert -1.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.triton_language import jit_varying, next_power_of_2, require_triton, tl

_CHUNK: Final = 1024
"""Number of (token, expert) pairs that a program scans at a time."""


class ExpertTiles(NamedTuple):
    """Expert of each tile, and the (token, expert) pairs in it.

    experts: (tiles,) int32, -1 for unused tiles.

    pairs: (tiles * TILE_M,) int32, ascending for each expert; unused entries equal the number of pairs.
    """

    experts: Tensor
    pairs: Tensor


def max_tiles(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """Return the maximum number of tiles of `tile_m` pairs, for any distribution of pairs over experts."""
    active = min(num_pairs, num_experts)
    return min(num_pairs, (num_pairs + active * (tile_m - 1)) // tile_m)


def align_experts(ids: Tensor, num_experts: int, tile_m: int) -> ExpertTiles:
    """Group pairs by expert into tiles, in one launch.

    There is a program per expert. It counts the pairs of all experts to find where its own tiles start, and fills these
    tiles in order.

    Args:
        ids: (pairs,) int32 or int64, contiguous; pairs with ids outside [0, num_experts) are in no tile.
        num_experts: Number of experts.
        tile_m: Pairs per tile.
    """
    require_triton()
    num_tiles = max_tiles(len(ids), num_experts, tile_m)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(num_tiles * tile_m, dtype=torch.int32, device=ids.device)
    sizes = len(ids), num_tiles, num_experts
    _align_experts_kernel[(num_experts,)](ids, experts, pairs, *sizes, **align_constants(num_experts, tile_m))
    return ExpertTiles(experts, pairs)


def align_constants(num_experts: int, tile_m: int) -> dict[str, int]:
    return {"TILE_M": tile_m, "TILE_E": next_power_of_2(num_experts), "CHUNK": _CHUNK}


@jit_varying(numbers=("num_pairs", "num_tiles"))
def _align_experts_kernel(
    ids: tl.tensor,
    experts: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_E: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Each program fills the tiles of one expert. The last expert's program also marks unused tiles."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    each = tl.arange(0, TILE_E)
    counts = tl.zeros([TILE_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        id = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        is_known = (id >= 0) & (id < num_experts)
        counts += tl.histogram(tl.where(is_known, id, 0), TILE_E, mask=is_known)
    tiles = (counts + TILE_M - 1) // TILE_M
    first = tl.sum(tl.where(each < expert, tiles, 0))
    num_own_tiles = tl.sum(tl.where(each == expert, tiles, 0))
    own_pairs = pairs + first * TILE_M
    num_stored = num_pairs * 0
    for start in range(0, num_pairs, CHUNK):
        id = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        is_own = id == expert
        order = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(own_pairs + num_stored + order - 1, start + lane, mask=is_own)
        num_stored += tl.sum(is_own.to(tl.int32))
    unused = num_stored + tl.arange(0, TILE_M)
    tl.store(own_pairs + unused, tl.zeros([TILE_M], tl.int32) + num_pairs, mask=unused < num_own_tiles * TILE_M)
    for start in range(0, num_own_tiles, CHUNK):
        tl.store(
            experts + first + start + lane, tl.zeros([CHUNK], tl.int32) + expert, mask=start + lane < num_own_tiles
        )
    if expert == num_experts - 1:
        for start in range(first + num_own_tiles, num_tiles, CHUNK):
            tl.store(experts + start + lane, tl.zeros([CHUNK], tl.int32) - 1, mask=start + lane < num_tiles)


def align_experts_torch(ids: Tensor, num_experts: int, tile_m: int) -> ExpertTiles:
    num_tiles = max_tiles(len(ids), num_experts, tile_m)
    experts = torch.full((num_tiles,), -1, dtype=torch.int32, device=ids.device)
    pairs = torch.full((num_tiles, tile_m), len(ids), dtype=torch.int32, device=ids.device)
    tile = 0
    for expert in range(num_experts):
        own_pairs = (ids == expert).nonzero()[:, 0].to(torch.int32)
        for start in range(0, len(own_pairs), tile_m):
            tile_pairs = own_pairs[start : start + tile_m]
            experts[tile], pairs[tile, : len(tile_pairs)] = expert, tile_pairs
            tile += 1
    return ExpertTiles(experts, pairs.flatten())

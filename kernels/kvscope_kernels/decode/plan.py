"""How a step's decodes, or short runs of queries, are cut, planned once for all layers, and the room for what their
parts find.

Owns the tensors of the plan; what they mean is `plan_kernel`'s.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvscope_kernels.decode.bounds import PartBounds, part_bounds
from kvscope_kernels.decode.plan_kernel import PART_FIELDS, plan_decode
from kvscope_kernels.launch import num_multiprocessors


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The parts of one batch; see `plan_decode`. On the device, and written there."""

    bounds: PartBounds
    parts: Tensor
    ranges: Tensor
    places: Tensor | None = None
    """Where the sums of each part's blocks begin, if these are kept."""
    num_places: int = 0
    """Blocks that there is room for."""


@dataclass(frozen=True, slots=True)
class SplitBuffers:
    """What the parts of requests that are cut leave to be merged: overwritten by each layer."""

    partial: Tensor
    """(num_parts, num_rows, value_dim) float32: each part's own softmax over values. Rows are queries by heads."""
    lse: Tensor
    """(num_parts, num_rows) float32: log2 of its sum of exponentials."""


@dataclass(frozen=True, slots=True)
class BlockSums:
    """What parts leave of each block's weights: overwritten by each layer, whose merge shares them out."""

    of_pieces: Tensor
    """(num_pieces, num_heads) float32: log2 of the sum of exponentials of a block, or of each piece of one."""
    lse: Tensor
    """(num_parts, num_heads) float32: the same of a part."""


class DecodePlans:
    """Of one step, or of one graph: a plan is launched where it is first asked for.

    One more for each other window, tile and number of programs, of which a model has one or two.
    """

    def __init__(self) -> None:
        self.plans: dict[tuple[int | None, ...], tuple[Tensor, DecodePlan]] = {}
        self._rooms: dict[tuple[int, ...], SplitBuffers] = {}
        self._sums: dict[tuple[int, ...], BlockSums] = {}

    def plan(
        self,
        seq_lens: Tensor,
        max_visible: int,
        window: int,
        programs_each: int,
        tile_n: int,
        num_warps: int,
        block_size: int = 0,
        num_places: int = 0,
        *,
        is_chunked: bool = False,
        reads_again: bool = False,
        most_cuts: int | None = None,
    ) -> DecodePlan:
        """How to cut requests of `seq_lens` (batch,) int32, of each of which up to `max_visible` tokens are seen.

        `window`: how many of a request's last tokens are seen by any of its queries; with `is_chunked` those of
        its last chunk of so many. `block_size`: of blocks whose sums are kept, if there are no more than `num_places`;
        parts then begin with blocks. `most_cuts`: what there is room for, if that may be less. See `part_bounds` for
        the rest.
        """
        shape = max_visible, window, programs_each, tile_n, num_warps, block_size, num_places
        key = (id(seq_lens), *shape, is_chunked, reads_again, most_cuts)
        known = self.plans.get(key)
        if known is None:
            processors = num_multiprocessors(seq_lens.device)
            cut = max_visible, programs_each, tile_n, processors, num_warps
            bounds = part_bounds(len(seq_lens), *cut, reads_again=reads_again)
            if most_cuts is not None and bounds.num_cuts > most_cuts:
                bounds = bounds._replace(num_parts=len(seq_lens) + most_cuts, num_cuts=most_cuts)
            # The lengths are kept, so that their id is not given to another tensor.
            made = _planned(seq_lens, bounds, window, tile_n, is_chunked, block_size, num_places)
            known = self.plans[key] = seq_lens, made
        return known[1]

    def sums(self, plan: DecodePlan, num_heads: int, pieces_each: int) -> BlockSums:
        """For the blocks of a plan that keeps their sums, in so many pieces each."""
        key = plan.num_places * pieces_each, plan.bounds.num_parts, num_heads
        if key not in self._sums:
            of_pieces, lse = (plan.parts.new_empty(size, num_heads, dtype=torch.float32) for size in key[:2])
            self._sums[key] = BlockSums(of_pieces, lse)
        return self._sums[key]

    def room(self, plan: DecodePlan, num_rows: int, value_dim: int) -> SplitBuffers:
        """For the parts of a plan; layers follow one another, so one is enough for all of a shape."""
        num_parts = plan.bounds.num_parts if plan.bounds.num_cuts else 0
        key = (num_parts, num_rows, value_dim)
        if key not in self._rooms:
            partial, lse = (plan.parts.new_empty(shape, dtype=torch.float32) for shape in (key, key[:2]))
            self._rooms[key] = SplitBuffers(partial, lse)
        return self._rooms[key]


def _planned(
    seq_lens: Tensor,
    bounds: PartBounds,
    window: int,
    tile_n: int,
    is_chunked: bool,
    block_size: int,
    num_places: int,
) -> DecodePlan:
    parts, ranges = seq_lens.new_empty(bounds.num_parts, PART_FIELDS), seq_lens.new_empty(len(seq_lens), 2)
    places = seq_lens.new_empty(bounds.num_parts) if block_size else None
    plan_decode(
        *(seq_lens, parts, ranges, bounds),
        window=window,
        tile_n=math.lcm(tile_n, block_size) if block_size else tile_n,
        is_chunked=is_chunked,
        places=places,
        block_size=block_size,
        num_places=num_places,
    )
    return DecodePlan(bounds, parts, ranges, places, num_places)

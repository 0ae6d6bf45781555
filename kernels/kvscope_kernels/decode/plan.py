"""Split of a step's decodes, or short runs of queries, into parts. Planned once for all layers.

Owns the tensors of the plan, whose contents `plan_kernel` defines, and the buffers for partial results.
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
    """The parts into which one batch is split, computed and stored on the device; see `plan_decode`."""

    bounds: PartBounds
    parts: Tensor
    ranges: Tensor
    sum_offsets: Tensor | None = None
    """Index of each part's first block in the block sums; None if no block sums are stored."""
    sum_capacity: int = 0


@dataclass(frozen=True, slots=True)
class SplitBuffers:
    """Partial attention results of split requests, to be merged. Each layer overwrites them."""

    partial: Tensor
    """(num_parts, num_rows, value_dim) float32: each part's softmax-weighted sum of values. A row is a query
    and a head.
    """
    lse: Tensor
    """(num_parts, num_rows) float32: log2 of the part's sum of exponentials."""


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Sums of the attention weights of each block. Attention stores them for each part, and the merge of the
    same layer reads them.
    """

    piece_sums: Tensor
    """(num_pieces, num_heads) float32: log2 of the sum of exponentials of a block, or of each piece of a block."""
    lse: Tensor
    """(num_parts, num_heads) float32: log2 of the sum of exponentials of each part."""


class DecodePlans:
    """Plans for splitting the requests of one step, or of one CUDA graph, into parts. Each plan is computed on first
    use.

    There is a separate plan for each combination of window, tile and number of programs. The layers of a model have one
    or two such combinations.
    """

    def __init__(self) -> None:
        self.plans: dict[tuple[int | None, ...], tuple[Tensor, DecodePlan]] = {}
        self._split_buffers: dict[tuple[int, ...], SplitBuffers] = {}
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
        sum_capacity: int = 0,
        *,
        is_chunked: bool = False,
        is_compute_bound: bool = False,
        max_cuts: int | None = None,
    ) -> DecodePlan:
        """Return the split of requests with `seq_lens` (batch,) int32.

        Args:
            seq_lens: Must stay unchanged while its plans are used: plans are cached by the tensor's identity.
            max_visible: Maximum number of visible tokens per request.
            window: Number of a request's last tokens that any of its queries attends to; with `is_chunked`, those of
                its last chunk of that length.
            programs_each: As for `part_bounds`.
            tile_n: As for `part_bounds`.
            num_warps: As for `part_bounds`.
            block_size: Size of blocks whose sums are stored, if there are no more than `sum_capacity`; parts then start
                at blocks. 0 if no sums are stored.
            sum_capacity: Capacity of the block sums, in blocks.
            is_chunked: As in `AttentionArgs`.
            is_compute_bound: As for `part_bounds`.
            max_cuts: Maximum number of additional parts for which the buffers have capacity; None for no limit.
        """
        shape = max_visible, window, programs_each, tile_n, num_warps, block_size, sum_capacity
        key = (id(seq_lens), *shape, is_chunked, is_compute_bound, max_cuts)
        cached = self.plans.get(key)
        if cached is None:
            num_processors = num_multiprocessors(seq_lens.device)
            split_arguments = max_visible, programs_each, tile_n, num_processors, num_warps
            bounds = part_bounds(len(seq_lens), *split_arguments, is_compute_bound=is_compute_bound)
            if max_cuts is not None and bounds.num_cuts > max_cuts:
                bounds = bounds._replace(num_parts=len(seq_lens) + max_cuts, num_cuts=max_cuts)
            # Keep a reference to the lengths, so that no other tensor gets their id.
            plan = _compute_plan(seq_lens, bounds, window, tile_n, is_chunked, block_size, sum_capacity)
            cached = self.plans[key] = seq_lens, plan
        return cached[1]

    def sums(self, plan: DecodePlan, num_heads: int, pieces_each: int) -> BlockSums:
        """Return buffers for the block sums of a plan, with `pieces_each` pieces per block."""
        key = plan.sum_capacity * pieces_each, plan.bounds.num_parts, num_heads
        if key not in self._sums:
            piece_sums, lse = (plan.parts.new_empty(size, num_heads, dtype=torch.float32) for size in key[:2])
            self._sums[key] = BlockSums(piece_sums, lse)
        return self._sums[key]

    def buffers(self, plan: DecodePlan, num_rows: int, value_dim: int) -> SplitBuffers:
        """Return buffers for the parts of a plan. Layers run one after the other, so all layers of the same
        shape share them.
        """
        num_parts = plan.bounds.num_parts if plan.bounds.num_cuts else 0
        key = (num_parts, num_rows, value_dim)
        if key not in self._split_buffers:
            partial, lse = (plan.parts.new_empty(shape, dtype=torch.float32) for shape in (key, key[:2]))
            self._split_buffers[key] = SplitBuffers(partial, lse)
        return self._split_buffers[key]


def _compute_plan(
    seq_lens: Tensor,
    bounds: PartBounds,
    window: int,
    tile_n: int,
    is_chunked: bool,
    block_size: int,
    sum_capacity: int,
) -> DecodePlan:
    parts, ranges = seq_lens.new_empty(bounds.num_parts, PART_FIELDS), seq_lens.new_empty(len(seq_lens), 2)
    sum_offsets = seq_lens.new_empty(bounds.num_parts) if block_size else None
    plan_decode(
        seq_lens,
        parts,
        ranges,
        bounds,
        window=window,
        tile_n=math.lcm(tile_n, block_size) if block_size else tile_n,
        is_chunked=is_chunked,
        sum_offsets=sum_offsets,
        block_size=block_size,
        sum_capacity=sum_capacity,
    )
    return DecodePlan(bounds, parts, ranges, sum_offsets, sum_capacity)

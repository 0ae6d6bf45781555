"""One memory pool of a what-if simulation: allocates blocks for requests, and frees blocks that attention no longer
reads.

Owns the simulated pool and its allocator. Decides neither which requests exist nor which are preempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.allocation.allocators import make_allocation, make_pool
from kvscope_engine.policy.allocation.fragmentation import kv_use
from kvscope_engine.policy.kv_groups import NULL_BLOCK
from kvscope_engine.policy.request import Request
from kvscope_engine.simulator.what_if.layouts import BlockGroup, PoolLayout
from kvscope_engine.simulator.what_if.slot_map import Spans
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.what_if import MapKind


@dataclass(frozen=True, slots=True)
class LayoutUse:
    """Use of one pool's slots. The six counts from `num_used` to `num_external` add up to `num_slots`."""

    num_slots: int
    num_used: int
    num_unread: int
    num_reserved: int
    num_internal: int
    num_rounding: int
    num_external: int
    largest_free_run: int

    @property
    def num_held(self) -> int:
        return self.num_slots - self.num_external


class PlacedPool:
    """Places requests in one pool with one allocator. Raises BadInput if the allocator cannot manage a pool
    with this layout.
    """

    def __init__(self, allocator_name: str, layout: PoolLayout, *, max_model_len: int) -> None:
        self.layout = layout
        rules = tuple(group.rule for group in layout.groups)
        self._num_null = 1 if any(rule.window for rule in rules) else 0
        self._has_unread = any(rule.window for group in layout.groups for _, rule in group.readers)
        num_blocks = layout.num_blocks + self._num_null
        self._pool = make_pool(allocator_name, num_blocks, layout.block_size, prefix_caching=False, groups=rules)
        self._allocation = make_allocation(allocator_name, self._pool, max_model_len=max_model_len)

    def grow(self, request: Request, num_tokens: int, step: int) -> bool:
        """Allocate blocks so that the request holds `num_tokens` tokens. Returns False if there are too few
        blocks; the caller must then release the request.
        """
        num_computed_before, request.num_computed_tokens = request.num_computed_tokens, num_tokens
        if not request.num_null_blocks or len(request.block_tables) != len(self.layout.groups):
            request.block_tables = tuple([] for _ in self.layout.groups)
            request.num_null_blocks = (0,) * len(self.layout.groups)
        needed = [self._prepare_group(request, group, step) for group in range(len(self.layout.groups))]
        if any(needed):
            request.num_computed_tokens = (
                num_computed_before  # policies that move and reserve expect the previous count
            )
            if sum(needed) > self._allocation.num_available(request):
                return False
            if self._allocation.reserves:
                self._move(request, sum(needed), step)
            for group, count in enumerate(needed):
                if count:
                    request.block_tables[group].extend(self._allocation.allocate(request, count, group))
            request.num_reserved_tokens = self._allocation.num_reserved_tokens(request)
            request.num_computed_tokens = num_tokens
        if num_tokens != num_computed_before:
            for index, kind in enumerate(self.layout.groups):
                self._write(request, index, kind, num_computed_before, step)
        return True

    def release(self, request: Request, step: int) -> None:
        if self._allocation.reserves:
            if request.block_table:
                self._allocation.release(request, step)
            return
        for blocks in _held_blocks(request):
            self._pool.release(blocks, step)

    def use(self, requests: Mapping[int, Request], limits: Mapping[int, int]) -> LayoutUse:
        """Return the use of the slots.

        `limits` maps request numbers to their maximum number of tokens (0 if unknown). If the allocator reserves
        memory, slots beyond the limit count as slots that will never be used.
        """
        counts_to_limit = self._allocation.reserves
        use = kv_use(self._pool, _with_expected_tokens(requests, limits) if counts_to_limit else requests.values())
        unread = 0
        if self._has_unread:
            unread = sum(int(slots.sum()) for request in requests.values() for _, slots in self._unread(request))
        return LayoutUse(
            num_slots=use.num_slots,
            num_used=use.num_used - unread,
            num_unread=unread,
            num_reserved=use.num_reserved,
            num_internal=use.num_internal,
            num_rounding=use.num_rounding,
            num_external=use.num_external,
            largest_free_run=use.largest_free_run,
        )

    def spans(self, requests: Mapping[int, Request], limits: Mapping[int, int]) -> dict[MapKind, Spans]:
        """Return the slots of each kind. Slots that are in none of the returned ranges are free. Takes O(blocks)."""
        size, ledger = self._pool.block_size, self._pool.ledger
        active = np.flatnonzero(ledger.state[: self._pool.num_blocks] == BlockState.ACTIVE)
        unread = np.zeros(self._pool.num_blocks, np.int64)
        for request in requests.values() if self._has_unread else ():
            for blocks, slots in self._unread(request):
                unread[blocks] = slots
        starts, filled, unread_slots = (
            (active - self._num_null) * size,
            ledger.filled[active].astype(np.int64),
            unread[active],
        )
        used_spans = {
            MapKind.UNREAD: Spans(starts, unread_slots),
            MapKind.USED: Spans(starts + unread_slots, filled - unread_slots),
        }
        if not self._allocation.reserves:
            return used_spans | {MapKind.INTERNAL: Spans(starts + filled, size - filled)}
        return used_spans | self._spans_of_runs(requests.values(), limits)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        holders = (
            self._allocation.holders(requests)
            if self._allocation.reserves
            else [blocks for request in requests for blocks in _held_blocks(request)]
        )
        self._pool.check_integrity(holders)

    def _prepare_group(self, request: Request, number: int, step: int) -> int:
        """Free the request's blocks that the layers of KV group `number` no longer read. Returns the number of
        further blocks that the request needs in this group.
        """
        group, table = self.layout.groups[number], request.block_tables[number]
        first, stop = request.num_null_blocks[number], group.num_null_blocks(request.num_computed_tokens)
        if stop > first:
            self._pool.release(table[first:stop], step)
            table[first:stop] = [NULL_BLOCK] * (stop - first)
            counts = request.num_null_blocks
            request.num_null_blocks = (*counts[:number], stop, *counts[number + 1 :])
        return group.num_blocks(request.num_computed_tokens) - len(table)

    def _move(self, request: Request, count: int, step: int) -> None:
        targets = self._allocation.move(request, count)
        if targets is None:
            return
        self._pool.record_move(request.block_table, targets, request.number, step)
        request.block_table[:] = targets
        self._allocation.commit(step)  # nothing is copied here: the old run is free immediately

    def _write(self, request: Request, number: int, group: BlockGroup, before: int, step: int) -> None:
        size, table, num_tokens = self._pool.block_size, request.block_tables[number], request.num_computed_tokens
        first = max(before // group.num_tokens, request.num_null_blocks[number]) if group.num_tokens else 0
        filled = [size] * (len(table) - first)
        if not filled:
            return  # a chunk ends here: nothing of it is read later
        if group.num_tokens:
            filled[-1] = self._slots(num_tokens - (len(table) - 1) * group.num_tokens, group)
        self._pool.record_write(table[first:], filled, [request.number] * len(filled), step)

    def _unread(self, request: Request) -> Iterator[tuple[list[int], npt.NDArray[np.int64]]]:
        """For each KV group, yield the request's blocks in which some slots are no longer read, and the number
        of such slots in each of these blocks.
        """
        for number, group in enumerate(self.layout.groups):
            if not group.num_tokens or not request.block_tables[number]:
                continue
            first = request.num_null_blocks[number]
            count = group.num_unread(request.num_computed_tokens) - first * group.num_tokens
            if count > 0:
                blocks = request.block_tables[number][first : first - (-count // group.num_tokens)]
                tokens = np.full(len(blocks), group.num_tokens, np.int64)
                tokens[-1] = count - (len(blocks) - 1) * group.num_tokens
                yield blocks, tokens * self._pool.block_size // group.num_tokens

    def _slots(self, num_tokens: int, group: BlockGroup) -> int:
        """Return how many of the pool's slots `num_tokens` in one block of `group` occupy, rounded up.

        A block always has `block_size` slots in the pool, but `group.num_tokens` tokens fill it, which may be more or
        fewer.
        """
        return -(-num_tokens * self._pool.block_size // group.num_tokens)

    def _spans_of_runs(self, requests: Iterable[Request], limits: Mapping[int, int]) -> dict[MapKind, Spans]:
        """Return the empty slots in each request's contiguous blocks, in three kinds: reserved slots up to the
        request's token limit (`RESERVED`), reserved slots beyond the limit (`INTERNAL`), and slots after the
        reservation (`ROUNDING`).
        """
        rows = sorted(
            self._run_boundaries(request, limits[request.number]) for request in requests if request.block_table
        )
        boundaries = np.array(rows, np.int64).reshape(-1, 4)
        kinds = (MapKind.RESERVED, MapKind.INTERNAL, MapKind.ROUNDING)
        return {
            kind: Spans(boundaries[:, column], boundaries[:, column + 1] - boundaries[:, column])
            for column, kind in enumerate(kinds)
        }

    def _run_boundaries(self, request: Request, limit: int) -> tuple[int, int, int, int]:
        """Return the pool slots at which four parts of the request's contiguous blocks end: its tokens, its
        token limit, its reservation, and its last block.
        """
        size, computed = self._pool.block_size, request.num_computed_tokens
        first = request.block_table[0] * size
        reserved = max(request.num_reserved_tokens, computed)
        end = self._allocation.num_held(request) * size
        return first + computed, first + max(computed, min(limit or reserved, reserved)), first + reserved, first + end


def _held_blocks(request: Request) -> Iterator[list[int]]:
    for table, num_null in zip(request.block_tables, request.num_null_blocks, strict=True):
        yield table[num_null:]


def _with_expected_tokens(requests: Mapping[int, Request], limits: Mapping[int, int]) -> Iterator[Request]:
    for number, request in requests.items():
        yield replace(request, expected_tokens=limits[number] or None)

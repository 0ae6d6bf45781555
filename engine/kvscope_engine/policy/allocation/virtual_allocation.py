"""The policy `virtual`: each request has addresses for the maximum length, and memory is mapped page by page.

After vAttention (Prabhu et al. 2024, arXiv 2405.04437). A request's blocks are contiguous, so its block table is a
range. The memory that a request holds without using it is only the end of its last page, but a page has far more tokens
than a block.

Owns the slot of each request. `PageSlots` counts groups, the pool owns the rows, and the `PageMapper` maps memory.
Memory is mapped when blocks are allocated, before the step that writes them. It is unmapped only while blocks are
allocated, and therefore never between a step's `schedule` and its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from kvscope_engine.policy.allocation.allocation_policy import TableAllocation
from kvscope_engine.policy.allocation.mapped_pool import MappedPool
from kvscope_engine.policy.block_needs import describe_length, num_blocks_for
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import PromptTooLong
from kvscope_telemetry.ledger import BlockState

SPARE_SHARE: Final = 100
"""One in `SPARE_SHARE` page groups, and at least one, must stay available to running requests when another is
admitted.
"""


class PageMapper(Protocol):
    """Maps physical memory to the addresses of blocks. Within a slot, mapping starts at the first block and unmapping
    at the last.
    """

    def map(self, first_block: int, num_blocks: int) -> None:
        """Map memory to `num_blocks` blocks from `first_block` on, none of which may have memory."""

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """Unmap the memory of `num_blocks` blocks from `first_block` on.

        The content of these blocks is lost, so no running step may use them.
        """


class NoMapper:
    """`PageMapper` of a simulation, which has no memory to map."""

    def map(self, first_block: int, num_blocks: int) -> None: ...

    def unmap(self, first_block: int, num_blocks: int) -> None: ...


class VirtualAllocation(TableAllocation):
    """Allocates slots of virtual addresses in an unused pool. Requests share no blocks."""

    def __init__(self, pool: MappedPool, mapper: PageMapper) -> None:
        self._pool = pool
        self._space = pool.page_slots.space
        self._mapper = mapper
        self._pages = pool.page_slots
        self._slots: dict[int, int] = {}  # request number -> slot

    @property
    def name(self) -> str:
        return "virtual"

    @property
    def reserves(self) -> bool:
        """Always True: a request holds all blocks of its last page."""
        return True

    @property
    def max_request_tokens(self) -> int:
        """Capacity of a slot in tokens, or of all memory if that is less."""
        return min(self._space.slot_blocks, self._space.num_physical_blocks) * self._pool.block_size

    def check_fits(self, request: Request) -> None:
        length = request.num_prompt_tokens + request.max_tokens
        if length > self.max_request_tokens:
            raise PromptTooLong(
                f"{describe_length(request)} make {length} tokens:"
                f" at most {self.max_request_tokens} are accepted, as allocator='virtual' has pages for"
                f" {self._space.num_physical_blocks} blocks of {self._pool.block_size}"
            )

    def num_available(self, request: Request) -> int:
        """Return the number of unused blocks in the request's pages, plus those that free and unneeded page
        groups would add.
        """
        slot, pages = self._slots.get(request.number), self._pages
        groups = pages.num_available + (pages.needed(slot) if slot is not None else -self._num_spare_groups)
        if slot is None and pages.num_used == self._space.num_slots:
            return 0
        backed = min(self._space.num_backed(max(0, groups)), self._space.slot_blocks)
        return backed - len(request.block_table)

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """Return the next `count` blocks of the request's slot, which is allocated first if it has none."""
        slot = self._slots.get(request.number)
        if slot is None:
            known = num_blocks_for(request.num_tokens, self._pool.block_size)
            slot = self._slots[request.number] = self._pages.allocate_slot(self._space.num_groups_for(known))
        held = len(request.block_table)
        self._ensure_mapped(slot, self._space.num_groups_for(held + count))
        first = slot * self._space.slot_blocks + held
        return self._pool.allocate_mapped(first, count, request.number)

    def release(self, request: Request, step: int) -> None:
        """Free the request's slot. Its pages remain mapped until another request needs them."""
        self._pages.free_slot(self._slots.pop(request.number))
        self._pool.release(request.block_table, step)

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """Return the block tables. Raises AssertionError unless slots, pages and rows agree."""
        self._pages.check()
        tables: list[Sequence[int]] = []
        without_slot = set(self._slots)
        for request in requests:
            self._check_request(request)
            without_slot.discard(request.number)
            tables.append(request.block_table)
        assert not without_slot, f"requests {sorted(without_slot)} ended and have a slot"
        assert len(set(self._slots.values())) == len(self._slots) == self._pages.num_used, "slots are miscounted"
        self._check_rows()
        return tables

    @property
    def _num_spare_groups(self) -> int:
        """Number of page groups that must remain available to running requests when another request starts; 0 if no
        request runs.

        If none remained, a request could be preempted immediately after its start.
        """
        return max(1, self._space.num_groups // SPARE_SHARE) if self._slots else 0

    def _ensure_mapped(self, slot: int, num_groups: int) -> None:
        """Map memory behind the first `num_groups` page groups of the slot.

        If too few groups are free, unneeded groups of other slots are unmapped.
        """
        pages = self._pages
        pages.set_needed(slot, num_groups)
        missing = num_groups - pages.mapped(slot)
        if missing <= 0:
            return
        for other_slot, num_remaining in list(pages.surplus(missing - pages.num_free)):
            self._unmap(other_slot, num_remaining)
        self._map(slot, num_groups)

    def _map(self, slot: int, num_groups: int) -> None:
        first, count = self._row_span(slot, self._pages.mapped(slot), num_groups)
        if count:  # 0 if the slot's last block lies within the groups mapped before
            self._mapper.map(first, count)
            self._pool.map_rows(first, count)
        self._pages.set_mapped(slot, num_groups)

    def _unmap(self, slot: int, num_groups: int) -> None:
        first, count = self._row_span(slot, num_groups, self._pages.mapped(slot))
        if count:
            self._mapper.unmap(first, count)
            self._pool.unmap_rows(first, count)
        self._pages.set_mapped(slot, num_groups)

    def _row_span(self, slot: int, start_group: int, stop_group: int) -> tuple[int, int]:
        """Return the first ledger row, and the number of rows, backed by the slot's groups `start_group` to
        `stop_group`.
        """
        start, stop = self._num_backed(start_group), self._num_backed(stop_group)
        return slot * self._space.slot_blocks + start, stop - start

    def _num_backed(self, num_groups: int) -> int:
        return min(self._space.num_backed(num_groups), self._space.slot_blocks)

    def _check_request(self, request: Request) -> None:
        slot, table = self._slots.get(request.number), request.block_table
        assert (slot is not None) == bool(table), f"request {request.number} has a slot and no table, or no slot"
        if slot is None:
            return
        first = slot * self._space.slot_blocks
        assert table == list(range(first, first + len(table))), f"request {request.number} has blocks out of its slot"
        needed = self._space.num_groups_for(len(table))
        assert self._pages.needed(slot) == needed, f"slot {slot} needs {needed} groups, not {self._pages.needed(slot)}"

    def _check_rows(self) -> None:
        space, state = self._space, self._pool.ledger.state
        backed = np.array([self._num_backed(self._pages.mapped(slot)) for slot in range(space.num_slots)])
        is_mapped = (state != BlockState.UNMAPPED).reshape(space.num_slots, space.slot_blocks)
        wrong = np.flatnonzero(is_mapped != (np.arange(space.slot_blocks) < backed[:, None]))
        assert not len(wrong), f"block {wrong[0]} has memory and no page, or a page and no memory ({len(wrong)} blocks)"

"""Measures how the token slots of the KV cache are used, and how scattered the free ones are. Changes nothing.

The categories are those of PagedAttention's Figure 2 (Kwon et al. 2023, arXiv 2309.06180, sections 3.1 and 6.2):

| in the figure                   | `KVUse`                                                   |
|---------------------------------|-----------------------------------------------------------|
| token states                    | `num_used`                                                |
| reservation                     | `num_reserved`                                            |
| internal fragmentation          | `num_internal`                                            |
| external fragmentation & others | `num_rounding + num_external` (`num_external_and_others`) |

A buddy allocator rounds reservations up to a power of two. The slots added by rounding belong to no token. They are
counted separately (`num_rounding`); the paper includes them in the fourth category. The paper's cache has no idle
prefix blocks; `num_cached` counts them.

Under `virtual`, only slots with memory count. The unused end of a request's pages is `num_internal`. Pages that no
request needs are `num_external`, and count as one run wherever they are mapped, because they can be mapped
contiguously.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.allocation.mapped_pool import page_slots_of
from kvscope_engine.policy.allocation.page_slots import PageSlots
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_telemetry.ledger import BlockState


@dataclass(frozen=True, slots=True)
class KVUse:
    """Counts of token slots. All but `num_slots` and `largest_free_run` are disjoint and add up to `num_slots`."""

    num_slots: int
    num_used: int
    """Slots that hold a token of a request; slots shared by several requests count once."""
    num_reserved: int
    """Empty slots reserved for future tokens of their request."""
    num_internal: int
    """Empty slots that are held and will never be used.

    They are the unused end of a last block (`paged`) or page (`virtual`), or slots reserved beyond the request's final
    length. If the final length (`expected_tokens`) is unknown, slots of the second kind count as reserved.
    """
    num_rounding: int
    """Empty slots held beyond any reservation, because the allocator rounds up to a power of two of whole blocks."""
    num_cached: int
    """Slots in cached blocks, which no request holds and which are evicted when needed."""
    num_external: int
    largest_free_run: int
    """Slots of the longest contiguous run of free blocks."""

    @property
    def num_external_and_others(self) -> int:
        """Slots of external fragmentation and rounding, the fourth category of the paper's Figure 2."""
        return self.num_external + self.num_rounding

    @property
    def external_fragmentation(self) -> float:
        """1 - largest free run / free slots, from 0 to 1. It is 0 if the free slots are contiguous, or no slot
        is free.
        """
        return 1 - self.largest_free_run / self.num_external if self.num_external else 0.0


def kv_use(pool: BlockPool, requests: Iterable[Request]) -> KVUse:
    """Return how the token slots of `pool` are used. `requests` must include all requests that hold blocks.

    Call it between steps: slots that a step in progress will fill count as unused. O(blocks).
    """
    pages = page_slots_of(pool)
    if pages is not None:
        return _page_use(pages, pool.block_size, requests)
    ledger, size = pool.ledger.part(0, pool.num_blocks), pool.block_size
    used = int(ledger.filled[ledger.state == BlockState.ACTIVE].sum())
    reserved, superfluous, has_reservations = _reservations(requests)
    remaining = pool.num_active * size - used - reserved - superfluous
    return KVUse(
        num_slots=pool.num_usable * size,
        num_used=used,
        num_reserved=reserved,
        num_internal=superfluous if has_reservations else remaining,
        num_rounding=remaining if has_reservations else 0,
        num_cached=pool.num_cached * size,
        num_external=pool.num_free * size,
        largest_free_run=_longest_run(ledger.state == BlockState.FREE) * size,
    )


def _page_use(pages: PageSlots, block_size: int, requests: Iterable[Request]) -> KVUse:
    """Count slots with memory, including parts of blocks that span the end of a page group."""
    slots_per_group = pages.space.group_blocks * block_size
    used = sum(request.num_computed_tokens for request in requests if request.block_table)
    held, all_slots = int(pages.num_needed * slots_per_group), int(pages.space.num_groups * slots_per_group)
    return KVUse(
        num_slots=all_slots,
        num_used=used,
        num_reserved=0,
        num_internal=held - used,
        num_rounding=0,
        num_cached=0,
        num_external=all_slots - held,
        largest_free_run=all_slots - held,
    )


def _reservations(requests: Iterable[Request]) -> tuple[int, int, bool]:
    """Return the number of empty reserved slots that will be used, the number of those that will not, and
    whether any request has a reservation.
    """
    usable = superfluous = 0
    has_any = False
    for request in requests:
        computed = request.num_computed_tokens
        if request.num_reserved_tokens:
            has_any = True
            limit = max(request.num_reserved_tokens, computed)  # a last block may be used beyond the reservation
            final = limit if request.expected_tokens is None else min(limit, request.expected_tokens)
            usable += max(0, final - computed)
            superfluous += limit - max(final, computed)
    return usable, superfluous, has_any


def _longest_run(mask: npt.NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0

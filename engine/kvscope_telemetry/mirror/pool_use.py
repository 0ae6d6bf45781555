"""Use of the KV pool's token slots, and fragmentation of the free ones, computed from a mirror. No Qt.

The categories are those of PagedAttention's Figure 2 (Kwon et al. 2023, arXiv 2309.06180): slots with a token, slots
reserved for future tokens, wasted slots, and free ones. The token limit of a request determines how many of its slots
may still be filled; those beyond it are wasted. Without reservations, each empty slot of a last block counts as wasted.

With the allocator `virtual`, a request has whole pages, so slots are those of physical memory, not of the rows, which
are address space. O(blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.messages.what_if import HOST_PAGE_BYTES, PAGE_BYTES
from kvscope_telemetry.mirror.mirror import Mirror

VIRTUAL: Final = "virtual"
RESERVING: Final = frozenset({"contiguous", "buddy", "oracle"})
"""Allocators with which a request has blocks that are not in its block table yet."""
_PIECE_BLOCKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Disjoint counts of token slots, which add up to all slots with physical memory."""

    num_used: int = 0
    """Slots with a token of a request. A slot that several requests share counts once."""
    num_reserved: int = 0
    """Empty slots reserved for future tokens of their request."""
    num_wasted: int = 0
    """Empty slots in requests' blocks that will not be filled and that no other request can use meanwhile."""
    num_cached: int = 0
    num_free: int = 0
    largest_free_run: int = 0
    """Slots in the longest range of contiguous free blocks; all free slots if contiguity is irrelevant (`virtual`)."""

    @property
    def num_held(self) -> int:
        return self.num_used + self.num_reserved + self.num_wasted

    @property
    def num_slots(self) -> int:
        return self.num_held + self.num_cached + self.num_free

    @property
    def internal_fragmentation(self) -> float | None:
        """Wasted share of the slots in requests' blocks, 0 to 1; None if no request has blocks."""
        return self.num_wasted / self.num_held if self.num_held else None

    @property
    def external_fragmentation(self) -> float | None:
        """Share of the free slots outside the largest free range, 0 to 1; None without free slots."""
        return 1 - self.largest_free_run / self.num_free if self.num_free else None


def pool_use(mirror: Mirror) -> PoolUse:
    """Return the use of the pool; lower tiers are not included. All counts are 0 before the first snapshot."""
    if mirror.hello is None:
        return PoolUse()
    ledger, pool, size = mirror.ledger, slice(mirror.num_blocks), mirror.hello.cache.block_size
    state = ledger.state[pool]
    used = _sum_of_active(ledger.filled[pool], state)
    if mirror.hello.cache.allocator == VIRTUAL:
        return _use_of_pages(mirror, mirror.hello, used)
    empty = _num_slots_of(mirror, state == BlockState.ACTIVE) - used
    has_reservations = mirror.hello.cache.allocator in RESERVING
    wasted = min(
        _num_slots_beyond_limits(mirror, state == BlockState.ACTIVE, size) if has_reservations else empty, empty
    )
    return PoolUse(
        num_used=used,
        num_reserved=empty - wasted,
        num_wasted=wasted,
        num_cached=_num_slots_of(mirror, state == BlockState.CACHED),
        num_free=mirror.num_free * size,
        largest_free_run=_longest_run(state == BlockState.FREE) * size,
    )


def _num_slots_of(mirror: Mirror, is_selected: npt.NDArray[np.bool_]) -> int:
    """Return the number of slots in selected blocks of the pool. Block sizes may differ among KV groups."""
    assert mirror.hello is not None, "it has a ledger"
    sizes = mirror.hello.cache.block_sizes
    if len(set(sizes)) == 1:
        return int(is_selected.sum()) * sizes[0]
    by_group = np.bincount(mirror.ledger.group[: is_selected.size][is_selected], minlength=len(sizes))
    return int((by_group[: len(sizes)] * np.array(sizes)).sum())


def _sum_of_active(filled: npt.NDArray[np.uint16], state: npt.NDArray[np.uint8]) -> int:
    """Return the number of filled slots of active blocks, summed over pieces of the columns.

    Temporary arrays for all blocks at once would need new memory from the operating system in each call.
    """
    starts = range(0, filled.size, _PIECE_BLOCKS)
    pieces = (
        (filled[start : start + _PIECE_BLOCKS], state[start : start + _PIECE_BLOCKS] == BlockState.ACTIVE)
        for start in starts
    )
    return sum(
        int((filled_piece * is_active).sum(dtype=np.int64)) for filled_piece, is_active in pieces
    )  # a mask costs ten times as much


def _use_of_pages(mirror: Mirror, hello: Hello, used: int) -> PoolUse:
    """Return the use with the allocator `virtual`, where a request occupies whole pages.

    Free pages count as one range, because they can be mapped anywhere.
    """
    cache, by_page = hello.cache, _blocks_by_page(hello)
    blocks = mirror.requests.num_blocks[mirror.requests.num_blocks > 0].astype(np.int64)
    pages = -(-blocks * by_page.denominator // by_page.numerator)
    num_held = int((pages * by_page.numerator * cache.block_size // by_page.denominator).sum())
    num_held = max(num_held, mirror.num_active * cache.block_size)
    free = max(0, (cache.num_physical_blocks or cache.num_blocks) * cache.block_size - num_held)
    return PoolUse(num_used=used, num_wasted=num_held - used, num_free=free, largest_free_run=free)


def _blocks_by_page(hello: Hello) -> Fraction:
    """Return how many blocks fit in the memory that is mapped for one block. That memory consists of whole
    pages in each layer's tensor.
    """
    if not hello.model.num_layers or not hello.cache.block_bytes:
        return Fraction(1)
    layer_bytes = Fraction(hello.cache.block_bytes, hello.model.num_layers)
    page_bytes = PAGE_BYTES if hello.device.kind == "cuda" else HOST_PAGE_BYTES
    return max(1, ceil(layer_bytes / page_bytes)) * page_bytes / layer_bytes


def _num_slots_beyond_limits(mirror: Mirror, is_active: npt.NDArray[np.bool_], block_size: int) -> int:
    """Return the number of slots that requests have beyond their token limits. All active rows that a request
    owns count as its slots.
    """
    owner, requests = mirror.ledger.owner[: mirror.num_blocks], mirror.requests
    starts = np.flatnonzero(np.diff(np.where(is_active, owner, -2), prepend=-3))
    is_held = is_active[starts]
    lengths = np.diff(np.append(starts, owner.size))[is_held]
    numbers, inverse = np.unique(owner[starts][is_held], return_inverse=True)
    num_held = np.bincount(inverse, lengths, len(numbers)).astype(np.int64) * block_size
    rows = np.minimum(np.searchsorted(requests.number, numbers), max(0, len(requests) - 1))
    if not len(requests):
        return 0
    limit = requests.num_prompt_tokens[rows] + requests.max_tokens[rows]
    is_known = (requests.number[rows] == numbers) & (requests.max_tokens[rows] > 0)
    max_slots = np.maximum(limit, requests.num_computed_tokens[rows])
    return int(np.maximum(num_held - max_slots, 0)[is_known].sum())


def _longest_run(mask: npt.NDArray[np.bool_]) -> int:
    if not mask.size:
        return 0
    edges = (mask[1:] != mask[:-1]).nonzero()[0] + 1
    ends = np.concatenate(([0] if mask[0] else [], edges, [mask.size] if mask[-1] else [])).astype(np.int64)
    return int((ends[1::2] - ends[::2]).max()) if ends.size else 0

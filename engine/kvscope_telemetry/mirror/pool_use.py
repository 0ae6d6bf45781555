"""Use of the KV pool's token slots, and the fragmentation of free ones, computed from a mirror. No Qt.

The categories are those of PagedAttention's Figure 2 (Kwon et al. 2023, arXiv 2309.06180): slots that hold a token,
slots reserved for future tokens, wasted slots, and free ones. The token limit of a request determines how many of its
slots may still be filled; those beyond it are wasted. Without reservations, every empty slot of a last block counts as
wasted.

Under `virtual` a request holds its pages, so slots are those of physical memory, not of the rows, which are address
space. O(blocks).
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
"""Allocators under which a request holds blocks that are not in its block table yet."""
_PIECE: Final = 1 << 16
"""Number of blocks per piece."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Disjoint counts of token slots, which add up to all slots with physical memory."""

    num_used: int = 0
    """Slots that hold a token of a request; shared ones count once."""
    num_reserved: int = 0
    """Empty slots reserved for future tokens of their request."""
    num_wasted: int = 0
    """Empty slots that are held and that nothing else can use meanwhile."""
    num_cached: int = 0
    num_free: int = 0
    largest_free_run: int = 0
    """Slots in the longest run of contiguous free blocks; all free slots if contiguity is irrelevant (`virtual`)."""

    @property
    def num_held(self) -> int:
        return self.num_used + self.num_reserved + self.num_wasted

    @property
    def num_slots(self) -> int:
        return self.num_held + self.num_cached + self.num_free

    @property
    def internal_fragmentation(self) -> float | None:
        """Wasted share of the held slots; None if none are held."""
        return self.num_wasted / self.num_held if self.num_held else None

    @property
    def external_fragmentation(self) -> float | None:
        """1 - largest free run / free; None if nothing is free."""
        return 1 - self.largest_free_run / self.num_free if self.num_free else None


def pool_use(mirror: Mirror) -> PoolUse:
    """Return the use of the pool, without lower tiers."""
    if mirror.hello is None:
        return PoolUse()
    ledger, pool, size = mirror.ledger, slice(mirror.num_blocks), mirror.hello.cache.block_size
    state = ledger.state[pool]
    used = _sum_of_active(ledger.filled[pool], state)
    if mirror.hello.cache.allocator == VIRTUAL:
        return _of_pages(mirror, mirror.hello, used)
    empty = _slots_of(mirror, state == BlockState.ACTIVE) - used
    reserves = mirror.hello.cache.allocator in RESERVING
    wasted = min(_beyond_limits(mirror, state == BlockState.ACTIVE, size) if reserves else empty, empty)
    return PoolUse(
        num_used=used,
        num_reserved=empty - wasted,
        num_wasted=wasted,
        num_cached=_slots_of(mirror, state == BlockState.CACHED),
        num_free=mirror.num_free * size,
        largest_free_run=_longest_run(state == BlockState.FREE) * size,
    )


def _slots_of(mirror: Mirror, chosen: npt.NDArray[np.bool_]) -> int:
    """Return the number of slots in the chosen blocks of the pool. Block sizes may differ among KV groups."""
    assert mirror.hello is not None, "it has a ledger"
    sizes = mirror.hello.cache.block_sizes
    if len(set(sizes)) == 1:
        return int(chosen.sum()) * sizes[0]
    by_group = np.bincount(mirror.ledger.group[: chosen.size][chosen], minlength=len(sizes))
    return int((by_group[: len(sizes)] * np.array(sizes)).sum())


def _sum_of_active(filled: npt.NDArray[np.uint16], state: npt.NDArray[np.uint8]) -> int:
    """Sum in pieces: temporary arrays for all blocks would need new memory from the system each time."""
    starts = range(0, filled.size, _PIECE)
    pieces = ((filled[at : at + _PIECE], state[at : at + _PIECE] == BlockState.ACTIVE) for at in starts)
    return sum(int((some * active).sum(dtype=np.int64)) for some, active in pieces)  # a mask costs ten times as much


def _of_pages(mirror: Mirror, hello: Hello, used: int) -> PoolUse:
    """Return the use under `virtual`: requests hold whole pages, and free pages are one run because they can be mapped
    anywhere.
    """
    cache, by_page = hello.cache, _blocks_by_page(hello)
    blocks = mirror.requests.num_blocks[mirror.requests.num_blocks > 0].astype(np.int64)
    pages = -(-blocks * by_page.denominator // by_page.numerator)
    held = int((pages * by_page.numerator * cache.block_size // by_page.denominator).sum())
    held = max(held, mirror.num_active * cache.block_size)
    free = max(0, (cache.num_physical_blocks or cache.num_blocks) * cache.block_size - held)
    return PoolUse(num_used=used, num_wasted=held - used, num_free=free, largest_free_run=free)


def _blocks_by_page(hello: Hello) -> Fraction:
    """Return how many blocks fit into the memory that must be mapped for one block (whole pages in each layer's
    tensor).
    """
    if not hello.model.num_layers or not hello.cache.block_bytes:
        return Fraction(1)
    in_layer = Fraction(hello.cache.block_bytes, hello.model.num_layers)
    page_bytes = PAGE_BYTES if hello.device.kind == "cuda" else HOST_PAGE_BYTES
    return max(1, ceil(in_layer / page_bytes)) * page_bytes / in_layer


def _beyond_limits(mirror: Mirror, active: npt.NDArray[np.bool_], block_size: int) -> int:
    """Return the held slots beyond the token limits of their requests. A request's run is the contiguous rows that it
    owns.
    """
    owner, requests = mirror.ledger.owner[: mirror.num_blocks], mirror.requests
    starts = np.flatnonzero(np.diff(np.where(active, owner, -2), prepend=-3))
    is_held = active[starts]
    lengths = np.diff(np.append(starts, owner.size))[is_held]
    numbers, inverse = np.unique(owner[starts][is_held], return_inverse=True)
    held = np.bincount(inverse, lengths, len(numbers)).astype(np.int64) * block_size
    rows = np.minimum(np.searchsorted(requests.number, numbers), max(0, len(requests) - 1))
    if not len(requests):
        return 0
    limit = requests.num_prompt_tokens[rows] + requests.max_tokens[rows]
    is_known = (requests.number[rows] == numbers) & (requests.max_tokens[rows] > 0)
    will_be = np.maximum(limit, requests.num_computed_tokens[rows])
    return int(np.maximum(held - will_be, 0)[is_known].sum())


def _longest_run(mask: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    if not mask.size:
        return 0
    edges = (mask[1:] != mask[:-1]).nonzero()[0] + 1
    ends = np.concatenate(([0] if mask[0] else [], edges, [mask.size] if mask[-1] else [])).astype(np.int64)
    return int((ends[1::2] - ends[::2]).max()) if ends.size else 0

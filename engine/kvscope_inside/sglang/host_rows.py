"""Publishes the pages that HiCache stores in host memory, as ledger rows after those of all pools.

Determines which contents were copied from the pool; these are known only after the requests' page tables were read.
Used on the publishing thread only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_inside.lower_tier_rows import LowerTierRows, StoredBlocks
from kvscope_inside.sglang.host_tier import HostPageEvent, Ids
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.producer.cache_state import CacheState


class PageContent(NamedTuple):
    """Ledger columns of pages of the pool. All arrays have one value per page."""

    hash: npt.NDArray[np.uint64]
    parent: npt.NDArray[np.uint64]
    owner: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]


def _select(is_first: npt.NDArray[np.bool_], first: PageContent, second: PageContent) -> PageContent:
    return PageContent(
        np.where(is_first, first.hash, second.hash),
        np.where(is_first, first.parent, second.parent),
        np.where(is_first, first.owner, second.owner),
        np.where(is_first, first.position, second.position),
    )


class HostRows:
    """Updates the ledger rows of host pages. `positions`: for each ledger row, the index of its page in the
    text of the owner.
    """

    def __init__(self, state: CacheState, positions: npt.NDArray[np.int32]) -> None:
        self._state, self._positions, self._size = state, positions, state.hello.cache.block_size
        self._tier = LowerTierRows(state)
        self._loading: dict[int, Ids] = {}
        """Map from a node of the radix tree to the ledger rows that are being copied into the pool for it."""

    def content(self, pages: Ids) -> PageContent:
        ledger = self._state.ledger
        return PageContent(ledger.hash[pages], ledger.parent[pages], ledger.owner[pages], self._positions[pages])

    def apply_event(
        self, step: int, event: HostPageEvent, pool_pages: Ids, before: PageContent, between: PageContent
    ) -> Ids:
        """Publish an event of host pages. Returns the rows that the caller must free, none of which is free yet.

        Args:
            pool_pages: Pages of the pool that the host pages were copied from or to.
            before: Contents of `pool_pages` before the copied page tables were read.
            between: Contents of `pool_pages` after the tables of requests that released their table row were read.
        """
        rows = event.pages + self._tier.first
        if event.kind == "saves":
            content = self._copied_content(event, pool_pages, before, between)
            self._positions[rows] = content.position
            blocks = StoredBlocks(rows, content.hash, content.parent, content.owner, self._size)
            self._tier.begin_store(event.node, blocks, step)
        elif event.kind == "saved":
            self._tier.end_store(event.node, step)
        elif event.kind == "loads":
            self._loading[event.node] = self._tier.begin_load(rows, step)
            self._state.add_moves("loaded", pool_pages.tolist())
            self._state.count(loaded_blocks=pool_pages.size)
        elif event.kind == "was read":
            self._tier.end_load(self._loading.pop(event.node, rows[:0]), step)
        elif event.kind == "frees":
            return self._tier.non_free(rows)
        return rows[:0]

    def clear(self) -> None:
        self._tier.clear()
        self._loading.clear()

    def _copied_content(
        self, event: HostPageEvent, pages: Ids, before: PageContent, between: PageContent
    ) -> PageContent:
        """Return the contents of `pages` at the time of the copy, chosen for each page from `before`, `between` and the
        current contents.

        The current contents may be newer than the copy: a request that released its pages wrote them before its
        release, and other requests may use these pages now.
        """
        if not pages.size:  # too many at once
            count = event.pages.size
            none = np.zeros(count, np.uint64)
            return PageContent(none, none, np.full(count, NO_OWNER, np.int32), np.zeros(count, np.int32))
        current = self.content(pages)
        was_released = (between.hash != before.hash) & (between.hash != 0)
        current = _select(was_released | (current.hash == 0), between, current)
        return _select(before.hash != 0, before, current) if event.is_unchanged else current

"""Publishes the pages that HiCache keeps in host memory, as ledger rows below all pools.

Determines which contents were copied from the pool; these are known only after the requests' pages were read. Used on
the publishing thread only.
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
    """Contents of pages of the pool."""

    hash: npt.NDArray[np.uint64]
    parent: npt.NDArray[np.uint64]
    owner: npt.NDArray[np.int32]
    place: npt.NDArray[np.int32]


def _either(is_first: npt.NDArray[np.bool_], first: PageContent, second: PageContent) -> PageContent:
    return PageContent(
        np.where(is_first, first.hash, second.hash),
        np.where(is_first, first.parent, second.parent),
        np.where(is_first, first.owner, second.owner),
        np.where(is_first, first.place, second.place),
    )


class HostRows:
    """Ledger rows of host pages. `positions`: index of each row's page in its owner's text."""

    def __init__(self, state: CacheState, positions: npt.NDArray[np.int32]) -> None:
        self._state, self._places, self._size = state, positions, state.hello.cache.block_size
        self._tier = LowerTierRows(state)
        self._loading: dict[int, Ids] = {}
        """Node of the tree -> rows that are being copied into the pool."""

    def content(self, pages: Ids) -> PageContent:
        """Return the contents of the pool's pages as known now."""
        ledger = self._state.ledger
        return PageContent(ledger.hash[pages], ledger.parent[pages], ledger.owner[pages], self._places[pages])

    def moved(self, step: int, moved: HostPageEvent, of_pool: Ids, before: PageContent, between: PageContent) -> Ids:
        """Publish an event. Returns the rows that held something and are free now.

        Args:
            of_pool: Pages of the pool that the host pages were copied from or to.
            before: Their contents before tables were read.
            between: Their contents after the tables of requests that released their row were read.
        """
        rows = moved.pages + self._tier.first
        if moved.kind == "saves":
            content = self._copied(moved, of_pool, before, between)
            self._places[rows] = content.place
            blocks = StoredBlocks(rows, content.hash, content.parent, content.owner, self._size)
            self._tier.begin_store(moved.node, blocks, step)
        elif moved.kind == "saved":
            self._tier.end_store(moved.node, step)
        elif moved.kind == "loads":
            self._loading[moved.node] = self._tier.begin_load(rows, step)
            self._state.add_moves("loaded", of_pool.tolist())
            self._state.count(loaded_blocks=of_pool.size)
        elif moved.kind == "was read":
            self._tier.end_load(self._loading.pop(moved.node, rows[:0]), step)
        elif moved.kind == "frees":
            return self._tier.non_free(rows)
        return rows[:0]

    def clear(self) -> None:
        self._tier.clear()
        self._loading.clear()

    def _copied(self, moved: HostPageEvent, pages: Ids, before: PageContent, between: PageContent) -> PageContent:
        """Return which of the three contents was copied.

        A request that released its pages wrote them before, and other requests may have them now.
        """
        if not pages.size:  # too many at once
            count = moved.pages.size
            none = np.zeros(count, np.uint64)
            return PageContent(none, none, np.full(count, NO_OWNER, np.int32), np.zeros(count, np.int32))
        now = self.content(pages)
        was_given_back = (between.hash != before.hash) & (between.hash != 0)
        now = _either(was_given_back | (now.hash == 0), between, now)
        return _either(before.hash != 0, before, now) if moved.is_unchanged else now

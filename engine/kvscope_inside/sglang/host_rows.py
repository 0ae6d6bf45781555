"""The ledger's rows of what HiCache keeps in host memory: a row a page, below all pools.

Owns what a row holds while it is written. Belongs to the thread that tells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_inside.sglang.host_tier import Ids, Moved
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.state.cache_state import CacheState


class Content(NamedTuple):
    """What pages of the pool held."""

    hash: npt.NDArray[np.uint64]
    parent: npt.NDArray[np.uint64]
    owner: npt.NDArray[np.int32]
    place: npt.NDArray[np.int32]


def _either(is_first: npt.NDArray[np.bool_], first: Content, second: Content) -> Content:
    return Content(
        np.where(is_first, first.hash, second.hash),
        np.where(is_first, first.parent, second.parent),
        np.where(is_first, first.owner, second.owner),
        np.where(is_first, first.place, second.place),
    )


class HostRows:
    """`places`: of each row, which page of its owner's text it is."""

    def __init__(self, state: CacheState, places: npt.NDArray[np.int32]) -> None:
        self._state, self._places = state, places
        self._first, self._size = state.hello.cache.num_blocks, state.hello.cache.block_size
        self._written: dict[int, tuple[Ids, Content]] = {}
        """By node."""
        self._read: dict[int, Ids] = {}

    def content(self, pages: Ids) -> Content:
        """Of pages of the pool, as it is known now."""
        ledger = self._state.ledger
        return Content(ledger.hash[pages], ledger.parent[pages], ledger.owner[pages], self._places[pages])

    def moved(self, step: int, moved: Moved, of_pool: Ids, before: Content, between: Content) -> Ids:
        """`of_pool`: the pages that these were copied from, or to; `before`: what they held before tables were read,
        `between`: when those of requests that gave theirs back were read. Rows that held something and are free now."""
        rows = moved.pages + self._first
        if moved.word == "saves":
            self._saves(step, moved, rows, of_pool, before, between)
        elif moved.word == "saved":
            self._saved(step, moved.node)
        elif moved.word == "loads":
            self._loads(step, moved.node, rows, of_pool)
        elif moved.word == "was read":
            self._was_read(step, moved.node)
        elif moved.word == "frees":
            return self._held(rows)
        return rows[:0]

    def emptied(self) -> None:
        """All are free."""
        self._written.clear()
        self._read.clear()

    def _saves(self, step: int, moved: Moved, rows: Ids, pages: Ids, before: Content, between: Content) -> None:
        """What of the three was copied: who gave its pages back wrote them before, and others may have them now."""
        node, now = moved.node, self.content(pages)
        was_given_back = (between.hash != before.hash) & (between.hash != 0)
        now = _either(was_given_back | (now.hash == 0), between, now)
        if moved.is_as_told:
            now = _either(before.hash != 0, before, now)
        if not pages.size:  # too many at once
            none = np.zeros(rows.size, np.uint64)
            now = Content(none, none, np.full(rows.size, NO_OWNER, np.int32), np.zeros(rows.size, np.int32))
        self._written[node] = rows, now
        self._places[rows] = now.place
        self._set(step, rows, state=BlockState.ACTIVE, ref_count=1, owner=now.owner, filled=0, hash=0, parent=0)

    def _saved(self, step: int, node: int) -> None:
        rows, content = self._written.pop(node, (np.empty(0, np.int64), None))
        if content is None:
            return
        still = self._state.ledger.state[rows] == BlockState.ACTIVE
        rows = rows[still]
        self._set(
            step,
            rows,
            state=BlockState.CACHED,
            ref_count=0,
            filled=self._size,
            hash=content.hash[still],
            parent=content.parent[still],
        )
        self._state.add_moves("saved", rows.tolist())
        self._state.count(offloaded_blocks=rows.size)

    def _loads(self, step: int, node: int, rows: Ids, pages: Ids) -> None:
        self._read[node] = held = self._held(rows)
        self._state.begin_read(held, step)
        self._state.add_moves("loaded", pages.tolist())
        self._state.count(loaded_blocks=pages.size)

    def _was_read(self, step: int, node: int) -> None:
        self._state.end_read(self._held(self._read.pop(node, np.empty(0, np.int64))), step)

    def _held(self, rows: Ids) -> Ids:
        held: Ids = rows[self._state.ledger.state[rows] != BlockState.FREE]
        return held

    def _set(self, step: int, rows: Ids, **columns: Any) -> None:
        self._state.set_blocks(rows, last_used_step=step, **columns)

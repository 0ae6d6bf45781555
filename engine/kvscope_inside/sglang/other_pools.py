"""Ledger rows of pages of sliding windows and of recurrent states, which SGLang stores in addition to the pages of full
attention.

All are recomputed from each copy of page tables, and only differences are written. Used on the publishing thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_inside.sglang.pools import Pools
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.producer.cache_state import CacheState, KnownRequest

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
"""Constant that is XORed with the hashes of pages to get the hashes of windows, so that the hashes of the same
text differ between KV groups.
"""
Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class Holder(NamedTuple):
    """A request that has a page table, as of the last copy of page tables."""

    known: KnownRequest
    pages: Ids
    num_published: int
    """Number of leading pages of the request that are in the radix tree."""
    num_tokens: int


class LostPrefixes(NamedTuple):
    """Ledger rows that lost a cached prefix, and their former hashes."""

    rows: Ids
    hashes: Hashes


def hashes_of_windows(hashes: Hashes) -> Hashes:
    """Return the hashes of window pages, computed from the hashes of the full-attention pages with the same
    text. 0 (no hash) stays 0.
    """
    return np.where(hashes != 0, (hashes ^ _MIX) | np.uint64(1), np.uint64(0))


class WindowRows:
    """Updates the ledger rows of window pages.

    A window page is referenced by a request if the request's window still reaches the page, or if the page is not in
    the radix tree yet. It remains cached as long as the radix tree refers to it, which may be shorter than for the
    corresponding page of full attention.
    """

    GROUP: Final = 1

    def __init__(self, state: CacheState, pools: Pools) -> None:
        assert pools.windows is not None, "there are windows"
        self._state, self._size, self._window = state, pools.page_size, pools.windows.num_tokens
        self._row_offset, self._num_pages = pools.window_row_offset, pools.windows.num_pages
        self._used = np.zeros(self._num_pages + 1, bool)
        """Whether each window page was in use in the last copy of page tables, by page id."""
        self._tables: dict[int, tuple[int, Ids]] = {}
        """Map from a request number to the index of the page at which the request's window begins, and the
        ledger rows of its pages from there on.
        """
        self._mapping = np.empty(0, np.int64)
        self.reset()

    def reset(self) -> None:
        rows = np.arange(self._row_offset + 1, self._row_offset + self._num_pages + 1)
        self._state.ledger.group[rows] = self.GROUP
        self._used[:], self._tables = False, {}

    def read(self, step: int, mapping: Ids, holders: Iterable[Holder]) -> LostPrefixes:
        """Publish the window pages as of a copy of page tables. Returns the rows that lost a cached prefix.

        `mapping`: for each page of full attention, the window page with the same tokens, or 0.
        """
        self._mapping = mapping
        ledger, rows_of = self._state.ledger, np.where(mapping > 0, mapping + self._row_offset, 0)
        numbers: set[int] = set()
        held_rows: list[Ids] = []
        for holder in holders:
            start = min(max(0, holder.num_tokens - self._window) // self._size, holder.num_published)
            entries = rows_of[holder.pages[start:]]
            held_rows.append(entries)
            if holder.known.state == RequestState.RUNNING:
                self._update_table(holder.known, start, entries)
                numbers.add(holder.known.number)
        self._tables = {number: table for number, table in self._tables.items() if number in numbers}
        pages = np.flatnonzero(rows_of)
        pages = pages[ledger.state[pages] != BlockState.FREE]
        rows = rows_of[pages]
        num_holders = np.bincount(np.concatenate([*held_rows, rows[:0]]), minlength=ledger.num_blocks)[rows]
        lost = self._free(rows)
        self._write(
            step,
            rows,
            state=np.where(num_holders > 0, BlockState.ACTIVE, BlockState.CACHED),
            ref_count=num_holders,
            filled=ledger.filled[pages],
            owner=ledger.owner[pages],
            hash=hashes_of_windows(ledger.hash[pages]),
            parent=hashes_of_windows(ledger.parent[pages]),
            prefix_hits=ledger.prefix_hits[pages],
        )
        return lost

    def page_of(self, row: int) -> int | None:
        """Return the page of full attention with the same tokens as the window page in `row`; None if there is none."""
        found = np.flatnonzero(self._mapping == row - self._row_offset)
        return int(found[0]) if found.size else None

    def _update_table(self, known: KnownRequest, first: int, entries: Ids) -> None:
        """Publish a request's window table from the first changed entry on. `entries` start at page `first`;
        earlier entries are 0.
        """
        old_first, old_entries = self._tables.get(known.number, (0, entries[:0]))
        table = known.tables[self.GROUP]
        self._tables[known.number] = first, entries
        start = min(first, old_first)
        old = np.concatenate((np.zeros(old_first - start, np.int64), old_entries))
        new = np.concatenate((np.zeros(first - start, np.int64), entries))
        common = min(old.size, new.size, max(0, len(table) - start))
        differ = np.flatnonzero(old[:common] != new[:common])
        first_changed = int(differ[0]) if differ.size else common
        if first_changed < new.size or start + new.size != len(table):
            if start + first_changed > len(table):  # the first time, or after `reset`
                known.set_table([0] * start + new.tolist(), self.GROUP)
            else:
                known.set_table(new[first_changed:].tolist(), self.GROUP, start + first_changed)
            self._state.touch(known)

    def _free(self, rows: Ids) -> LostPrefixes:
        ledger, used = self._state.ledger, np.zeros_like(self._used)
        used[rows - self._row_offset] = True
        freed = np.flatnonzero(self._used & ~used) + self._row_offset
        self._used = used
        hashes = ledger.hash[freed]
        self._state.free_blocks(freed)
        self._state.set_blocks(freed, group=self.GROUP)
        return LostPrefixes(freed[hashes != 0], hashes[hashes != 0])

    def _write(self, step: int, rows: Ids, **columns: Any) -> None:
        _write_changes(self._state, step, rows, self.GROUP, columns)


class StateRows:
    """Updates the ledger rows of recurrent states.

    A state in use is active if a request has it, and otherwise cached by the radix tree. The text of a cached state is
    unknown, because only the tree maps states to texts.
    """

    def __init__(self, state: CacheState, pools: Pools) -> None:
        assert pools.states is not None, "there are states"
        self._state, self._num_states = state, pools.states.num_states
        self._row_offset = state.hello.cache.first_state - 1
        """Difference between the ledger row and the id of a state. State 0, to which padding is written, has no row."""
        self._group = 1 + (pools.windows is not None)
        self._size = state.hello.cache.block_sizes[self._group]
        self._owners = np.full(self._num_states + 1, NO_OWNER)
        self.reset()

    def reset(self) -> None:
        rows = np.arange(1, self._num_states + 1) + self._row_offset
        self._state.ledger.group[rows] = self._group
        self._owners[:] = NO_OWNER

    def read(
        self,
        step: int,
        free: npt.NDArray[np.bool_],
        columns: Sequence[Ids],
        holders: Iterable[tuple[Holder, int]],
    ) -> Ids:
        """Publish the states as of a copy of page tables. Returns the rows that were cached and are free now.

        Args:
            free: Whether each state is free, by id.
            columns: Arrays of shape (table rows, columns) with the states of each table row's request.
            holders: Requests, each with the index of its table row.
        """
        ref_counts, filled = np.zeros(self._num_states + 1, np.int32), np.zeros(self._num_states + 1, np.int64)
        for holder, row in holders:
            ids = np.concatenate([each[row] for each in columns])
            ids = ids[(ids > 0) & ~free[np.clip(ids, 0, self._num_states)]]
            ref_counts[ids] += 1
            self._owners[ids] = holder.known.number
            filled[ids[:1]] = min(holder.num_tokens, self._size)
            if holder.known.state == RequestState.RUNNING:
                table = (ids + self._row_offset).tolist()
                if holder.known.tables[self._group] != table:
                    holder.known.set_table(table, self._group)
                    self._state.touch(holder.known)
        ledger, ids = self._state.ledger, np.arange(1, self._num_states + 1)
        is_free = free[ids] & (ref_counts[ids] == 0)
        freed = ids[is_free] + self._row_offset
        freed = freed[ledger.state[freed] != BlockState.FREE]
        lost: Ids = freed[ledger.state[freed] == BlockState.CACHED]
        self._owners[ids[is_free]] = NO_OWNER
        self._state.free_blocks(freed)
        self._state.set_blocks(freed, group=self._group)
        ids = ids[~is_free]
        columns_of = {
            "state": np.where(ref_counts[ids] > 0, BlockState.ACTIVE, BlockState.CACHED),
            "ref_count": ref_counts[ids],
            "owner": self._owners[ids],
            "filled": filled[ids],
        }
        _write_changes(self._state, step, ids + self._row_offset, self._group, columns_of)
        return lost


def _write_changes(state: CacheState, step: int, rows: Ids, group: int, columns: dict[str, Any]) -> None:
    ledger, differ = state.ledger, np.zeros(rows.size, bool)
    for name, values in columns.items():
        differ |= getattr(ledger, name)[rows] != values
    written = {name: np.asarray(values)[differ] for name, values in columns.items()}
    state.set_blocks(rows[differ], group=group, last_used_step=step, **written)

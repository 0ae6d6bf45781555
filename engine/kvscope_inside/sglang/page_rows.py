"""Publishes each copy of SGLang's page tables: rows of the ledger and block tables of requests.

Owns the last copied tables, the number of tables that contain each page, and the request that wrote each page. Used on
the publishing thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvscope_inside.evicted_hashes import MAX_HASHES
from kvscope_inside.host_request import HostRequest
from kvscope_inside.sglang.host_rows import HostRows, PageContent
from kvscope_inside.sglang.host_tier import HostPageEvent
from kvscope_inside.sglang.other_pools import Holder, StateRows, WindowRows
from kvscope_inside.sglang.pools import Pools
from kvscope_inside.sglang.sglang_recorder import Pages, Row
from kvscope_inside.sglang.text_hashes import Hashes, hashes_of, text_sums, tokens_of
from kvscope_inside.sglang.text_keys import TextKey
from kvscope_inside.translator import Translator
from kvscope_telemetry.ledger import NO_OWNER, BlockState

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class SglangRequest(HostRequest):
    key: TextKey = field(default_factory=TextKey)
    num_retractions: int = 0
    has_ended: bool = False
    num_hits: int = 0
    """Number of leading pages that were found in the prefix cache. The first `num_hits_counted` of them have
    been counted as hits.
    """
    num_hits_counted: int = 0
    num_filled: int = 0
    """Number of tokens in the request's pages, as of the last copy of page tables."""
    num_published: int = 0
    """Number of leading pages in the radix tree, as of the last copy of page tables."""
    table: Ids = field(default_factory=lambda: np.empty(64, np.int64))
    """Buffer of page ids, of which the first `num_pages` are in use."""
    num_pages: int = 0
    sums: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    """Values of `text_sums` at the end of each full page."""

    @property
    def pages(self) -> Ids:
        return self.table[: self.num_pages]

    @property
    def holder(self) -> Holder:
        return Holder(self.known, self.pages, self.num_published, self.num_filled)

    def set_pages(self, first: int, ids: Ids) -> None:
        """Replace the page table from entry `first` on by `ids`. Does nothing if entries before `first` are unknown."""
        if first > self.num_pages:
            return
        self.num_pages = first + ids.size
        if self.num_pages > self.table.size:
            self.table = np.concatenate((self.table, np.empty(self.num_pages, np.int64)))
        self.table[first : self.num_pages] = ids

    def forget_pages(self) -> None:
        """Clear the page table, because its pages may belong to other requests now."""
        self.num_pages = self.num_filled = self.num_published = 0

    def hashes(self, num_pages: int, page_size: int) -> Hashes:
        """Return the hashes of the first `num_pages` pages of the request's text; 0 for pages that are not full yet."""
        num_known = self.sums.size
        if num_known < num_pages:
            start, end = num_known * page_size, num_pages * page_size
            tokens = tokens_of(self.host, start, end)
            num_whole = tokens.size // page_size * page_size
            last_sum = int(self.sums[-1]) if num_known else self.key.seed
            sums = text_sums(tokens[:num_whole], start, last_sum)[page_size - 1 :: page_size]
            self.sums = np.concatenate((self.sums, sums))
        hashes = np.zeros(num_pages, np.uint64)
        known_hashes = hashes_of(self.sums[:num_pages])
        hashes[: known_hashes.size] = known_hashes
        return hashes


class PageRows:
    """Updates the ledger rows of all pools from copies of SGLang's page tables.

    `find` maps SGLang's request object to the published request, or to None if it is unknown. `on_ended` is called with
    a request when it has ended and has released its last table row.
    """

    def __init__(
        self,
        translator: Translator[SglangRequest],
        pools: Pools,
        find: Callable[[Any], SglangRequest | None],
        on_ended: Callable[[SglangRequest], None],
    ) -> None:
        state = translator.state
        self._translator, self._state, self._size = translator, state, translator.block_size
        self._find, self._on_ended = find, on_ended
        self.num_rows = pools.num_pages + 1
        """Number of ledger rows for pages of full attention, including row 0, to which padding is written."""
        self.windows = WindowRows(state, pools) if pools.windows is not None else None
        self.recurrent_states = StateRows(state, pools) if pools.states is not None else None
        self.positions = np.zeros(state.hello.cache.num_rows, np.int32)
        """For each ledger row, the index of its page in the text of the owner."""
        self.evicted_at = 0
        """Step of the last eviction since the last complete copy of page tables; 0 if there was none."""
        self._host = HostRows(state, self.positions)
        self._refs = np.zeros(self.num_rows, np.int32)
        """Number of page tables that contain each page, by page id."""
        self._free = np.ones(self.num_rows, bool)
        """Whether each page was free in the last copy, by page id."""
        self._undecided: Ids = np.empty(0, np.int64)
        """Ids of pages that are neither free nor in a page table read so far. Their table is in a later copy."""
        self._changed_pages: list[Ids] = []
        """Ids of pages in the tables that changed in the current copy, before and after the change."""

    def release(self, request: SglangRequest) -> None:
        self._refs[request.pages] -= 1

    def clear(self) -> None:
        state = self._state
        self._refs[:] = 0
        state.free_blocks(np.flatnonzero(state.ledger.state[1:] != BlockState.FREE) + 1)
        for pool in (self.windows, self.recurrent_states):
            if pool is not None:
                pool.reset()
        self._host.clear()

    def read(self, pages: Pages) -> None:
        self._changed_pages = []
        entries, free = pages.copy.entries(), pages.copy.free()
        windows, states = pages.copy.windows(), pages.copy.states()
        pages.copy.done()
        ends = np.cumsum([event.num_entries for event in (*pages.released, *pages.rows)], dtype=np.int64)
        spans = iter(np.split(entries, ends)[: len(ends)])
        host_events: list[tuple[HostPageEvent, Ids, PageContent]] = []
        for row in pages.released:
            ids = next(spans)
            if isinstance(row, HostPageEvent):
                host_events.append((row, ids, self._host.content(ids)))
                continue
            request = self._find(row.request)
            if request is not None:
                self._add_entries([(request, row)], ids)
                self._release(request, row.is_last)
        contents_between = [self._host.content(ids) for _, ids, _ in host_events]
        found = [(self._find(row.request), row, ids) for row, ids in zip(pages.rows, spans, strict=True)]
        held = [(request, row) for request, row, _ in found if request is not None]
        self._add_entries(
            held, np.concatenate([entries[:0], *(ids for request, _, ids in found if request is not None)])
        )
        self._fill(held)
        for request, row in held:
            request.num_published = row.published
        for (event, ids, before), between in zip(host_events, contents_between, strict=True):
            freed = self._host.apply_event(self._translator.step.number, event, ids, before, between)
            self._discard_cached(freed)
            self._state.free_blocks(freed)
        self._write_states(free, pages.is_whole)
        self._read_other_pools(pages, windows, states)
        if pages.is_whole:
            self.evicted_at = 0

    def _add_entries(self, held: Sequence[tuple[SglangRequest, Row]], entries: Ids) -> None:
        """Publish the copied page table entries of each request in `held`, with hashes for pages that are in the radix
        tree.

        `entries` has the page ids of all these requests, concatenated; those of one request are its pages `Row.first`
        to `Row.end`.
        """
        if not held:
            return
        ledger = self._state.ledger
        counts = np.array([row.end - row.first for _, row in held])
        firsts = np.array([row.first for _, row in held])
        starts = np.cumsum(counts) - counts
        positions = np.arange(entries.size) - np.repeat(starts - firsts, counts)
        hashes_of_entries, parents = np.zeros(entries.size, np.uint64), np.zeros(entries.size, np.uint64)
        tails: list[Ids] = []
        entry_list, starts_at = entries.tolist(), starts.tolist()
        for (request, row), begin, count in zip(held, starts_at, counts.tolist(), strict=True):
            end = begin + count
            if row.first < request.num_pages:
                tails.append(request.table[row.first : request.num_pages].copy())
            request.set_pages(row.first, entries[begin:end])
            if not request.has_ended and request.is_running:
                self._translator.blocks.set_table(request, entry_list[begin:end], start=row.first)
            num_published = min(row.published, row.end) - row.first
            if num_published > 0:
                hashes = request.hashes(row.published, self._size)
                hashes_of_entries[begin : begin + num_published] = hashes[row.first : row.first + num_published]
                before = hashes[max(0, row.first - 1) : row.first + num_published - 1]
                parents[begin + num_published - before.size : begin + num_published] = before
        np.add.at(self._refs, entries, 1)
        if tails:
            np.subtract.at(self._refs, np.concatenate(tails), 1)
        self._changed_pages += [*tails, entries]
        old_hashes = ledger.hash[entries]
        self._discard_prefixes(entries[(old_hashes != 0) & (old_hashes != hashes_of_entries)])
        is_new = (hashes_of_entries == 0) | (old_hashes != hashes_of_entries) | (ledger.owner[entries] == NO_OWNER)
        new = entries[is_new]
        self.positions[new] = positions[is_new]
        numbers = np.repeat([request.known.number for request, _ in held], counts)
        self._state.set_blocks(new, owner=numbers[is_new], prefix_hits=0)
        self._state.set_blocks(entries, hash=hashes_of_entries, parent=parents)
        self._state.set_blocks(entries[hashes_of_entries != 0], filled=self._size)
        for request, _ in held:
            if request.num_hits > request.num_hits_counted:
                self._count_hits(request)

    def _count_hits(self, request: SglangRequest) -> None:
        end = min(request.num_hits, request.num_pages)
        ids, request.num_hits_counted = request.table[request.num_hits_counted : end], end
        self._state.set_blocks(ids, prefix_hits=self._state.more_hits(ids))

    def _release(self, request: SglangRequest, is_last: bool) -> None:
        self._changed_pages.append(request.pages.copy())
        if request.has_ended and is_last:
            self._on_ended(request)
        else:
            self.release(request)
            request.forget_pages()

    def _fill(self, held: Sequence[tuple[SglangRequest, Row]]) -> None:
        """Publish the number of tokens in each page of the requests in `held`. Pages in the radix tree are all full."""
        size = self._size
        ids: list[Ids] = []
        starts_at: list[int] = []
        for request, row in held:
            begin = max(min(row.first, request.num_filled // size), row.published)
            starts_at.append(begin)
            ids.append(request.table[begin : request.num_pages])
            request.num_filled = row.num_tokens
        if not ids:
            return
        counts = np.array([each.size for each in ids])
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - np.array(starts_at), counts)
        lengths = np.repeat([row.num_tokens for _, row in held], counts)
        self._state.set_blocks(np.concatenate(ids), filled=np.clip(lengths - positions * size, 0, size))

    def _write_states(self, free: npt.NDArray[np.bool_] | None, is_whole: bool) -> None:
        """Set the block state of pages that were freed or allocated since the last copy, and of pages in
        changed tables.
        """
        ledger = self._state.ledger
        changed = [*self._changed_pages, self._undecided]
        if free is None:
            free = ledger.hash[: self.num_rows] == 0
        changed.append(np.flatnonzero(free != self._free))
        self._free = free
        ids = np.unique(np.concatenate(changed))
        ids = ids[ids >= self._translator.num_reserved]
        refs, is_free = self._refs[ids], free[ids]
        if not is_whole:  # some are in tables that follow with the next copy
            is_undecided = ~is_free & (refs == 0) & (ledger.hash[ids] == 0)
            self._undecided, is_free = ids[is_undecided], is_free | is_undecided
        else:
            self._undecided = ids[:0]
        is_free &= refs == 0
        freed, others = ids[is_free], ids[~is_free]
        self._discard_cached(freed)
        self._state.free_blocks(freed)
        others_refs = refs[~is_free]
        state = np.where(others_refs > 0, BlockState.ACTIVE, BlockState.CACHED)
        step = self._translator.step.number
        self._state.set_blocks(others, state=state, ref_count=others_refs, last_used_step=step)
        self._state.set_blocks(others[others_refs == 0], filled=self._size)

    def _read_other_pools(
        self, pages: Pages, windows: Ids | None, states: tuple[npt.NDArray[np.bool_], list[Ids]] | None
    ) -> None:
        step = self._translator.step
        if self.windows is not None and windows is not None:
            holders = (each.holder for each in self._translator.requests.values() if each.num_pages)
            lost = self.windows.read(step.number, windows, holders)
            self._record_evicted(lost.rows, lost.hashes)
        if self.recurrent_states is not None and states is not None:
            requests_of_rows = [(self._find(host), row) for host, row in pages.table_rows]
            holders_of_rows = [(request.holder, row) for request, row in requests_of_rows if request is not None]
            step.evicted += self.recurrent_states.read(step.number, *states, holders_of_rows).tolist()

    def _discard_cached(self, rows: Ids) -> None:
        """Record that cached prefixes in these rows were evicted. Rows without a cached prefix are skipped."""
        self._discard_prefixes(rows[self._state.ledger.hash[rows] != 0])

    def _discard_prefixes(self, rows: Ids) -> None:
        self._record_evicted(rows, self._state.ledger.hash[rows])

    def _record_evicted(self, rows: Ids, hashes: Hashes) -> None:
        step = self._translator.step
        step.evicted += rows.tolist()
        self._translator.evicted_hashes.record(hashes[-MAX_HASHES:].tolist(), self.evicted_at or step.number)

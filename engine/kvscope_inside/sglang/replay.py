"""Makes of SGLang's notes what is told: rows of the ledger, requests with their block tables, events with causes.

Owns what of the past is needed for that: block tables as they were read, which request wrote a page, tokens of cached
pages. Belongs to the thread that tells; of SGLang's objects it reads only what never changes again, or only grows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope_inside.evicted_hashes import MAX_KNOWN, EvictedHashes
from kvscope_inside.sglang.asking import Evicted
from kvscope_inside.sglang.host_rows import Content, HostRows
from kvscope_inside.sglang.host_tier import Moved
from kvscope_inside.sglang.notes import Note, Pages, Ran, Row
from kvscope_inside.sglang.other_pools import Holder, StateRows, WindowRows, hashes_of_windows
from kvscope_inside.sglang.pools import Pools
from kvscope_inside.sglang.texts import Beginnings, NameOf, Notes, TextKey, key_of, media_of
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame, Timings
from kvscope_telemetry.state.cache_state import CacheState, KnownRequest

MAX_ENDED_KNOWN: Final = 1_000
"""Requests that ended, whose pages were not read yet."""
TEXTS_ARE_SORTED_OUT_EVERY: Final = 256
"""Requests that ended: then texts go of which no page is left."""
_REASONS: Final = {
    "FINISH_MATCHED_TOKEN": "stopped",
    "FINISH_MATCHED_STR": "stopped",
    "FINISHED_MATCHED_REGEX": "stopped",
    "FINISH_LENGTH": "reached its limit of new tokens",
    "FINISH_ABORT": "aborted",
}
Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Known:
    """A request of SGLang's, and what is told of it."""

    theirs: Any
    told: KnownRequest
    waits_since_ns: int
    key: TextKey
    num_retractions: int = 0
    has_run: bool = False
    has_ended: bool = False
    num_hits: int = 0
    """Pages of its table that it found cached, and how many of them were counted."""
    num_hits_counted: int = 0
    num_filled: int = 0
    """Tokens that its pages held when they were read last."""
    num_published: int = 0
    """Its first so many pages were in the tree then."""
    table: Ids = field(default_factory=lambda: np.empty(64, np.int64))
    """As it was read last, `num_pages` of it; the rest is room."""
    num_pages: int = 0
    sums: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    """`text_sums` at the end of each page."""

    @property
    def pages(self) -> Ids:
        """Its table."""
        return self.table[: self.num_pages]

    def put(self, first: int, ids: Ids) -> None:
        """From entry `first` on the table is `ids`, unless what is before was never read."""
        if first > self.num_pages:
            return
        self.num_pages = first + ids.size
        if self.num_pages > self.table.size:
            self.table = np.concatenate((self.table, np.empty(self.num_pages, np.int64)))
        self.table[first : self.num_pages] = ids

    def forget_pages(self) -> None:
        """It has none any more."""
        self.num_pages = self.num_filled = self.num_published = 0


@dataclass(slots=True)
class _Step:
    """What is gathered for one frame."""

    number: int
    time_ns: int
    evicted: list[int] = field(default_factory=list)
    used: list[Ids] = field(default_factory=list)
    evictions: dict[int, list[int]] = field(default_factory=dict)
    """By the number of the request that they were for, 0 where that is not known: blocks of each kind."""


class Replay:
    """Changes `state`, which is of `pools`, by notes, in their order. `by_priority`: requests are retracted by
    priority, and not those that generated the fewest tokens; `drafts_per_step`: tokens that are guessed ahead, 0
    where that is not always as many; `name_of`: an adapter."""

    def __init__(
        self,
        state: CacheState,
        *,
        pools: Pools,
        by_priority: bool = False,
        policy: str = "lru",
        drafts_per_step: int = 0,
        name_of: NameOf = lambda _: None,
    ) -> None:
        self.state = state
        self._drafts_per_step, self._name_of = drafts_per_step, name_of
        self._beginnings = Beginnings()
        self._windows = WindowRows(state, pools) if pools.windows is not None else None
        self._of_states = StateRows(state, pools) if pools.states is not None else None
        self._num_rows = pools.num_pages + 1
        """Of full attention."""
        self._size = state.hello.cache.block_size
        self._by_priority, self._policy = by_priority, policy
        self._by_object: dict[int, _Known] = {}
        """Until they ended and their row was given back."""
        self._ended: OrderedDict[int, None] = OrderedDict()
        num_rows = self._num_rows
        self._refs = np.zeros(num_rows, np.int32)
        """How many tables have a page."""
        self._places = np.zeros(state.hello.cache.num_rows, np.int32)
        """Which page of its owner's text it is."""
        self._host = HostRows(state, self._places)
        self._texts: dict[int, tuple[Any, TextKey, list[tuple[str, int, int]]]] = {}
        """By number: tokens, key and media of requests that ended, of which pages are left."""
        self._num_ended = 0
        self._free = np.ones(num_rows, bool)
        """As it was read last."""
        self._undecided: Ids = np.empty(0, np.int64)
        """Neither free nor in a table that was read so far."""
        self._evicted_hashes = EvictedHashes()
        self._evicted_at = 0
        """The step of the last eviction since pages were read; 0: there was none."""

    def apply(self, note: Note) -> Frame:
        """The frame of what the note is about."""
        state, ran = self.state, note.ran
        step = _Step(state.step + (ran is not None), note.time_ns)
        for word, *about in note.happened:
            _HANDLERS[word](self, step, *about)
        self._evictions(step)
        decoding = self._decoding(ran) if ran is not None else []
        numbers = self._figures(step, note) if ran is not None else {}
        for request, reason in note.ended:
            self._finished(step, request, type(reason).__name__)
        if note.pages is not None:
            self._pages(step, note.pages)
        states = [request.state for request in state.requests.values()]
        state.totals["num_running"] = states.count(RequestState.RUNNING)
        state.totals["num_waiting"] = len(states) - state.totals["num_running"]
        state.add_moves("evicted", step.evicted)
        schedule_ns = ran.schedule_ns if ran is not None else 0
        return state.frame(
            step.number,
            note.time_ns,
            batch=numbers,
            num_decode_tokens=sum(numbers.get(number, 0) for number in decoding),
            timings=Timings(schedule_ns, note.run_ns, 0, note.commit_ns, note.note_ns) if ran is not None else None,
        )

    def _of(self, request: Any) -> _Known | None:
        known = self._by_object.get(id(request))
        return known if known is not None and known.theirs is request else None

    def contents(self, blocks: Sequence[int]) -> list[BlockContent]:
        """What pages hold, as far as it is known; no tokens of those that hold nothing."""
        return [self._content(block) for block in blocks]

    def _content(self, block: int) -> BlockContent:
        ledger, cache = self.state.ledger, self.state.hello.cache
        number = int(ledger.owner[block]) if block < cache.first_state else NO_OWNER
        is_of_windows = self._num_rows <= block < cache.num_blocks
        page = self._windows.page_of(block) if is_of_windows and self._windows is not None else block
        if number == NO_OWNER or page is None:
            return BlockContent(block=block)
        text, key, media = self._texts.get(number, ((), TextKey(), []))
        if number not in self._texts:
            known = next((each for each in self._by_object.values() if each.told.number == number), None)
            if known is not None:
                text = _tokens(known.theirs, 0, known.told.num_computed_tokens)
                key, media = known.key, media_of(known.theirs)
        start = int(self._places[page]) * self._size
        tokens = tuple(map(int, text[start : start + int(ledger.filled[block])]))
        notes = _notes(key, media, start, len(tokens))
        return BlockContent(block=block, number=number, start=start, token_ids=tokens, notes=notes)

    # What happened, by the words of the notes.

    def _added(
        self, step: _Step, request: Any, at_ns: int, num_retractions: int, num_free: int, for_whom: Any = None
    ) -> None:
        known = self._of(request)
        if known is not None and not known.has_ended:
            if num_retractions > known.num_retractions:
                self._retracted(step, known, num_free, self._number(for_whom))
                known.num_retractions = num_retractions
            return
        key = key_of(request, self._name_of)
        told = self.state.add_request(
            str(request.rid),
            num_prompt_tokens=len(request.origin_input_ids),
            arrival_ns=at_ns,
            max_tokens=int(getattr(request.sampling_params, "max_new_tokens", 0) or 0),
            priority=_as_priority(request.priority),
            adapter=key.adapter,
        )
        self._by_object[id(request)] = _Known(request, told, told.info.arrival_ns, key)

    def _scheduled(self, step: _Step, request: Any, num_cached: int, num_loaded: int = 0) -> None:
        known = self._of(request)
        if known is None:  # it came by another way than the queue
            self._added(step, request, step.time_ns, 0, 0)
            known = self._by_object[id(request)]
        if known.has_ended or known.told.state == RequestState.RUNNING:
            return  # it goes on with its prompt
        known.has_run = True
        told, num_prompt = known.told, known.told.info.num_prompt_tokens
        returns = told.state == RequestState.PREEMPTED
        num_known = num_prompt + told.num_output_tokens
        if returns:
            self.state.count(restored_tokens=num_cached, recomputed_tokens=max(0, num_known - num_cached))
        else:
            told.num_cached_tokens = num_cached
            self.state.count(
                admitted=1, prompt_tokens=max(0, num_prompt - num_cached), cached_tokens=min(num_cached, num_prompt)
            )
        told.state, told.num_computed_tokens = RequestState.RUNNING, num_cached
        known.num_hits, known.num_hits_counted = num_cached // self._size, 0
        missed, token, at_step = self._missed(known, num_cached, num_known)
        data = EventData(
            kind="started",
            waited_ns=max(0, step.time_ns - known.waits_since_ns),
            num_known_tokens=num_known,
            num_pool_blocks=max(0, num_cached - num_loaded) // self._size,
            num_loaded_blocks=min(num_loaded, num_cached) // self._size,
            missed=missed,
            missed_token=token,
            missed_step=at_step,
            num_states=int(self._of_states is not None and num_cached > 0),  # what is found ends where the tree has one
        )
        event = Event(
            kind="resumed" if returns else "admitted",
            time_ns=step.time_ns,
            number=told.number,
            num_blocks=-(-num_known // self._size),
            num_tokens=num_cached,
            data=data,
        )
        self.state.add_event(msgspec.structs.replace(event, cause=cause_text(event)))
        self.state.touch(told)

    def _retracted(self, step: _Step, known: _Known, num_free: int, other: int) -> None:
        told, num_tokens = known.told, known.told.num_computed_tokens
        num_blocks = -(-num_tokens // self._size)
        why = (
            f"having the lowest priority ({told.info.priority})"
            if self._by_priority
            else f"having generated the fewest tokens ({told.num_output_tokens})"
        )
        first = f", request #{other} first" if other else ""
        cause = (
            f"the running requests needed more blocks than were free or could be evicted{first}; request "
            f"#{told.number} was chosen, {why}; {num_tokens} tokens in {num_blocks} blocks given up; {num_free} tokens "
            f"are free now"
        )
        for group in range(told.num_groups):
            told.set_table((), group)
        told.state, told.num_computed_tokens = RequestState.PREEMPTED, 0
        told.num_preemptions += 1
        known.waits_since_ns = step.time_ns
        self.state.count(preemptions=1)
        self.state.touch(told)
        event = Event(
            kind="preempted",
            time_ns=step.time_ns,
            number=told.number,
            other=other,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            cause=cause,
        )
        self.state.add_event(event)

    def _aborted(self, step: _Step, request: Any, num_outputs: int) -> None:
        self._finished(step, request, "FINISH_ABORT")

    def _evicted(self, step: _Step, evicted: Evicted) -> None:
        counts = [-(-evicted.num_tokens // self._size), -(-evicted.num_window_tokens // self._size), evicted.num_states]
        before = step.evictions.get(number := self._number(evicted.request), [0] * len(counts))
        step.evictions[number] = [a + b for a, b in zip(before, counts, strict=True)]

    def _evictions(self, step: _Step) -> None:
        if step.evictions:
            self._evicted_at = step.number
        for number, (num_blocks, num_of_windows, num_states) in step.evictions.items():
            parts = [_counted(num_blocks, "cached block")] if num_blocks else []
            parts += [_counted(num_of_windows, "cached block") + " of windows"] if num_of_windows else []
            parts += [_counted(num_states, "cached state")] if num_states else []
            total = num_blocks + num_of_windows
            self.state.count(evicted_blocks=total)
            whom = f" for request #{number}" if number else ""
            order = f"in the order of SGLang's {self._policy}"
            order = f"whole ends of prefixes, {order}" if num_blocks else order
            what = f"{' and '.join(parts)} {'was' if total + num_states == 1 else 'were'} evicted{whom}, {order}"
            cause = f"too little was free; {what}"
            event = Event(kind="evicted", time_ns=step.time_ns, other=number, num_blocks=total, cause=cause)
            self.state.add_event(event)

    def _number(self, request: Any) -> int:
        """Of a request of SGLang's; 0: it is none that is known."""
        known = self._of(request)
        return known.told.number if known is not None else 0

    def _flushed(self, step: _Step) -> None:
        is_cached = self.state.ledger.state == BlockState.CACHED
        first_state = self.state.hello.cache.first_state
        num_blocks, num_states = (int(np.count_nonzero(part)) for part in np.split(is_cached, [first_state]))
        for key in [key for key, known in self._by_object.items() if known.has_ended]:
            self._forget(key)
        for known in self._by_object.values():
            known.forget_pages()
        self._refs[:] = 0
        self._texts.clear()
        self._evicted_hashes.clear()
        self.state.free_blocks(np.flatnonzero(self.state.ledger.state[1:] != BlockState.FREE) + 1)
        for pool in (self._windows, self._of_states):
            if pool is not None:
                pool.empty()
        self._host.emptied()
        states = f" and {_counted(num_states, 'cached state')}" if num_states else ""
        cause = f"the prefix cache was emptied: {_counted(num_blocks, 'cached block')}{states}"
        self.state.add_event(Event(kind="note", time_ns=step.time_ns, num_blocks=num_blocks, cause=cause))

    def _finished(self, step: _Step, request: Any, reason: str) -> None:
        known = self._of(request)
        if known is None or known.has_ended:
            return
        told, is_aborted = known.told, reason == "FINISH_ABORT"
        num_blocks = len(told.tables[0])
        known.has_ended = True
        self.state.finish(told)
        self.state.count(aborted=is_aborted, finished=not is_aborted)
        event = Event(
            kind="aborted" if is_aborted else "finished",
            time_ns=step.time_ns,
            number=told.number,
            num_blocks=num_blocks,
            cause=f"{_REASONS.get(reason, reason.lower())} after {told.num_output_tokens} tokens; "
            f"{num_blocks} blocks released",
        )
        self.state.add_event(event)
        if not known.has_run:
            self._forget(id(request))
            return
        tokens = _tokens(request, 0, len(request.origin_input_ids) + len(request.output_ids)).astype(np.int32)
        self._texts[told.number] = tokens, known.key, media_of(request)
        self._ended[id(request)] = None
        if len(self._ended) > MAX_ENDED_KNOWN:
            self._forget(next(iter(self._ended)))
        self._num_ended += 1
        if self._num_ended % TEXTS_ARE_SORTED_OUT_EVERY == 0:
            self._sort_out_texts()

    def _sort_out_texts(self) -> None:
        ended = {self._by_object[key].told.number for key in self._ended}
        needed = set(np.unique(self.state.ledger.owner).tolist()) | ended
        self._texts = {number: text for number, text in self._texts.items() if number in needed}

    def _forget(self, key: int) -> None:
        """It ended and has no row any more."""
        self._ended.pop(key, None)
        known = self._by_object.pop(key, None)
        if known is not None:
            self._refs[known.pages] -= 1

    # How things stand after it.

    def _decoding(self, ran: Ran) -> list[int]:
        """Numbers of those that go on with their answers in the step."""
        found = [self._of(request) for request in ran.requests]
        return [
            known.told.number
            for known, num_tokens in zip(found, ran.num_tokens, strict=True)
            if known is not None and known.told.num_output_tokens and num_tokens == 1
        ]

    def _figures(self, step: _Step, note: Note) -> dict[int, int]:
        """Tokens of each request that ran; how many ran, by number."""
        assert note.ran is not None, "called for steps"
        numbers: dict[int, int] = {}
        ran = note.ran
        for place, request in enumerate(ran.requests):
            known = self._of(request)
            if known is None or known.has_ended:
                continue
            self.state.tokens_came(known.told, note.num_outputs[place], step.time_ns)
            if known.told.state == RequestState.RUNNING:
                known.told.num_computed_tokens = note.computed[place]
            numbers[known.told.number] = ran.num_tokens[place]
            if note.guessed and self._drafts_per_step:
                self._guessed(known.told, *note.guessed[place])
            self.state.touch(known.told)
        return numbers

    def _guessed(self, told: KnownRequest, num_steps: int, num_right: int) -> None:
        num_drafts = num_steps * self._drafts_per_step
        self.state.count(
            draft_tokens=max(0, num_drafts - told.num_draft_tokens),
            accepted_tokens=max(0, num_right - told.num_accepted_tokens),
        )
        told.num_draft_tokens, told.num_accepted_tokens = num_drafts, num_right

    # Pages, as they were read.

    def _pages(self, step: _Step, pages: Pages) -> None:
        entries, free = pages.copy.entries(), pages.copy.free()
        windows, states = pages.copy.windows(), pages.copy.states()
        pages.copy.done()
        ends = np.cumsum([each.num_entries for each in (*pages.gone, *pages.rows)], dtype=np.int64)
        spans = iter(np.split(entries, ends)[: len(ends)])
        moved: list[tuple[Moved, Ids, Content]] = []
        for row in pages.gone:
            ids = next(spans)
            if isinstance(row, Moved):
                moved.append((row, ids, self._host.content(ids)))
                continue
            known = self._of(row.request)
            if known is not None:
                self._hold(step, [(known, row)], ids)
                self._give_up(step, known, row.is_last)
        between = [self._host.content(ids) for _, ids, _ in moved]
        found = [(self._of(row.request), row, ids) for row, ids in zip(pages.rows, spans, strict=True)]
        held = [(known, row) for known, row, _ in found if known is not None]
        self._hold(step, held, np.concatenate([entries[:0], *(ids for known, _, ids in found if known is not None)]))
        self._fill(held)
        for known, row in held:
            known.num_published = row.published
        for (each, ids, before), after_gone in zip(moved, between, strict=True):
            freed = self._host.moved(step.number, each, ids, before, after_gone)
            had = self.state.ledger.hash[freed]
            self._lost(step, freed[had != 0], had[had != 0])
            self.state.free_blocks(freed)
        self._states(step, free, pages.is_whole)
        self._other_pools(step, pages, windows, states)
        if pages.is_whole:
            self._evicted_at = 0

    def _hold(self, step: _Step, held: Sequence[tuple[_Known, Row]], entries: Ids) -> None:
        """Pages of tables, from entry `first` of each on, and which of them the tree has."""
        if not held:
            return
        ledger = self.state.ledger
        counts = np.array([row.end - row.first for _, row in held])
        firsts = np.array([row.first for _, row in held])
        starts = np.cumsum(counts) - counts
        places = np.arange(entries.size) - np.repeat(starts - firsts, counts)
        own, parents = np.zeros(entries.size, np.uint64), np.zeros(entries.size, np.uint64)
        tails: list[Ids] = []
        texts, begins = entries.tolist(), starts.tolist()
        for (known, row), begin, count in zip(held, begins, counts.tolist(), strict=True):
            end = begin + count
            if row.first < known.num_pages:
                tails.append(known.table[row.first : known.num_pages].copy())
            known.put(row.first, entries[begin:end])
            if not known.has_ended and known.told.state == RequestState.RUNNING:
                known.told.set_table(texts[begin:end], 0, row.first)
                self.state.touch(known.told)
            num_published = min(row.published, row.end) - row.first
            if num_published > 0:
                hashes = self._hashes(known, row.published)
                own[begin : begin + num_published] = hashes[row.first : row.first + num_published]
                before = hashes[max(0, row.first - 1) : row.first + num_published - 1]
                parents[begin + num_published - before.size : begin + num_published] = before
        np.add.at(self._refs, entries, 1)
        if tails:
            np.subtract.at(self._refs, np.concatenate(tails), 1)
        step.used += [*tails, entries]
        had = ledger.hash[entries]
        are_lost = (had != 0) & (had != own)
        self._lost(step, entries[are_lost], had[are_lost])
        are_new = (own == 0) | (had != own) | (ledger.owner[entries] == NO_OWNER)
        new = entries[are_new]
        self._places[new] = places[are_new]
        numbers = np.repeat([known.told.number for known, _ in held], counts)
        self.state.set_blocks(new, owner=numbers[are_new], prefix_hits=0)
        self.state.set_blocks(entries, hash=own, parent=parents)
        self.state.set_blocks(entries[own != 0], filled=self._size)
        for known, _ in held:
            if known.num_hits > known.num_hits_counted:
                self._count_hits(known)

    def _count_hits(self, known: _Known) -> None:
        end = min(known.num_hits, known.num_pages)
        ids, known.num_hits_counted = known.table[known.num_hits_counted : end], end
        self.state.set_blocks(ids, prefix_hits=self.state.more_hits(ids))

    def _give_up(self, step: _Step, known: _Known, is_last: bool) -> None:
        """Its row is another's, from now on."""
        step.used.append(known.pages.copy())
        if known.has_ended and is_last:
            self._forget(id(known.theirs))
        else:
            self._refs[known.pages] -= 1
            known.forget_pages()

    def _fill(self, held: Sequence[tuple[_Known, Row]]) -> None:
        """Slots that hold tokens: those of the tree's pages are all full."""
        size = self._size
        ids: list[Ids] = []
        begins: list[int] = []
        for known, row in held:
            begin = max(min(row.first, known.num_filled // size), row.published)
            begins.append(begin)
            ids.append(known.table[begin : known.num_pages])
            known.num_filled = row.num_tokens
        if not ids:
            return
        counts = np.array([each.size for each in ids])
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - np.array(begins), counts)
        lengths = np.repeat([row.num_tokens for _, row in held], counts)
        self.state.set_blocks(np.concatenate(ids), filled=np.clip(lengths - places * size, 0, size))

    def _states(self, step: _Step, free: npt.NDArray[np.bool_] | None, is_whole: bool) -> None:
        """Of pages that were freed or given out since the last copy, and those of tables that changed."""
        ledger = self.state.ledger
        changed = [*step.used, self._undecided]
        if free is None:
            free = ledger.hash[: self._num_rows] == 0
        changed.append(np.flatnonzero(free != self._free))
        self._free = free
        ids = np.unique(np.concatenate(changed))
        ids = ids[ids >= self.state.hello.cache.num_reserved_blocks]
        refs, is_free = self._refs[ids], free[ids]
        if not is_whole:  # some of these are in tables that come with the next copy
            is_undecided = ~is_free & (refs == 0) & (ledger.hash[ids] == 0)
            self._undecided, is_free = ids[is_undecided], is_free | is_undecided
        else:
            self._undecided = ids[:0]
        is_free &= refs == 0
        freed, others = ids[is_free], ids[~is_free]
        had = ledger.hash[freed]
        self._lost(step, freed[had != 0], had[had != 0])
        self.state.free_blocks(freed)
        others_refs = refs[~is_free]
        state = np.where(others_refs > 0, BlockState.ACTIVE, BlockState.CACHED)
        self.state.set_blocks(others, state=state, ref_count=others_refs, last_used_step=step.number)
        self.state.set_blocks(others[others_refs == 0], filled=self._size)

    def _other_pools(
        self,
        step: _Step,
        pages: Pages,
        windows: Ids | None,
        states: tuple[npt.NDArray[np.bool_], list[Ids]] | None,
    ) -> None:
        if self._windows is not None and windows is not None:
            holders = (_holder(known) for known in self._by_object.values() if known.num_pages)
            lost = self._windows.read(step.number, windows, holders)
            self._lost(step, lost.rows, lost.hashes)
        if self._of_states is not None and states is not None:
            found = [(self._of(request), row) for request, row in pages.places]
            of_rows = [(_holder(known), row) for known, row in found if known is not None]
            step.evicted += self._of_states.read(step.number, *states, of_rows).tolist()

    def _lost(self, step: _Step, ids: Ids, hashes: Hashes) -> None:
        """These held cached prefixes, and do not any more."""
        step.evicted += ids.tolist()
        self._evicted_hashes.note(hashes[-MAX_KNOWN:].tolist(), self._evicted_at or step.number)

    def _hashes(self, known: _Known, num_pages: int) -> Hashes:
        """Of the first pages of its text."""
        have = known.sums.size
        if have < num_pages:
            start, end = have * self._size, num_pages * self._size
            tokens = _tokens(known.theirs, start, end)
            whole = tokens.size // self._size * self._size
            before = int(known.sums[-1]) if have else known.key.seed
            sums = text_sums(tokens[:whole], start, before)[self._size - 1 :: self._size]
            known.sums = np.concatenate((known.sums, sums))
        hashes = np.zeros(num_pages, np.uint64)
        found = mixed(known.sums[:num_pages]) | np.uint64(1)
        hashes[: found.size] = found
        return hashes

    def _missed(self, known: _Known, num_cached: int, num_known: int) -> tuple[str, int, int]:
        """Why not more of its text was cached: a kind of `EventData.missed`, the token, the step."""
        place = num_cached // self._size
        token = place * self._size
        if token + self._size >= num_known:
            return "", 0, 0
        hashes = self._hashes(known, place + 1)
        evicted_at = self._evicted_hashes.step_of(int(hashes[place]))
        if evicted_at is None and self._windows is not None:
            of_windows = self._evicted_hashes.step_of(int(hashes_of_windows(hashes[place : place + 1])[0]))
            evicted_at = of_windows if of_windows is not None else evicted_at
        if evicted_at is not None:
            return "evicted", token, evicted_at
        if (self.state.ledger.hash[: self._num_rows] == hashes[place]).any():
            return "", 0, 0  # it is there, and another group has not what belongs to it
        if not place:
            return self._missed_from_its_start(known, int(hashes[0])), 0, 0
        return ("differs" if (self.state.ledger.parent == hashes[place - 1]).any() else "unseen"), token, 0

    def _missed_from_its_start(self, known: _Known, own: int) -> str:
        tokens = _tokens(known.theirs, 0, self._size)
        plain = int((mixed(text_sums(tokens, 0, 0)[-1:]) | np.uint64(1))[0])
        missed = self._beginnings.missed(plain, known.key, lambda value: bool((self.state.ledger.hash == value).any()))
        self._beginnings.note(plain, known.key, own)
        return missed


_HANDLERS: Final[dict[str, Callable[..., None]]] = {
    "added": Replay._added,
    "scheduled": Replay._scheduled,
    "aborted": Replay._aborted,
    "evicted": Replay._evicted,
    "flushed": Replay._flushed,
}


def _holder(known: _Known) -> Holder:
    return Holder(known.told, known.pages, known.num_published, known.num_filled)


def _notes(key: TextKey, media: Sequence[tuple[str, int, int]], start: int, count: int) -> Notes:
    """Of `count` tokens of a text from `start` on."""
    here = [each for each in media if each[1] < start + count and start <= each[2]]
    return (*key.notes(), *((kind, f"tokens {first} to {last} of the prompt") for kind, first, last in here))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def mixed(values: Hashes) -> Hashes:
    """Each bit of the result depends on all bits of a value (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def text_sums(tokens: Ids, start: int, before: int) -> Hashes:
    """One number for the text up to each token: `before` is that of all before token `start`. SGLang's own hashes are
    made only where somebody asks for KV events, and one after the other; these are a running sum."""
    places = np.arange(start + 1, start + 1 + tokens.size, dtype=np.uint64)
    each = mixed(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + mixed(places))
    sums: Hashes = np.cumsum(each, dtype=np.uint64) + np.uint64(before)
    return sums


def _tokens(request: Any, start: int, end: int) -> Ids:
    """Of its prompt and answer."""
    prompt, outputs = request.origin_input_ids, request.output_ids
    length = len(prompt)
    parts = [prompt[start:end], outputs[max(0, start - length) : max(0, end - length)]]
    return np.concatenate([np.array(part, np.int64) for part in parts])


def _as_priority(value: Any) -> int:
    return max(-(1 << 31), min(int(value or 0), (1 << 31) - 1))

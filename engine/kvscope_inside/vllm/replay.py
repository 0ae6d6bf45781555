"""Makes of vLLM's notes what is told: rows of the ledger, requests with their block tables, events with causes.

Owns what of the past is needed for that: which number a request has, what was evicted when, tokens of cached blocks.
Belongs to the thread that tells; of vLLM's objects it reads only what never changes again, or only grows.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope_inside.evicted_hashes import EvictedHashes
from kvscope_inside.vllm.block_texts import BlockText, hash_of_row, key_of, low_bits, notes_of, text_of
from kvscope_inside.vllm.host_rows import MAX_TEXTS, HostRows
from kvscope_inside.vllm.notes import Note
from kvscope_inside.vllm.second_pool import SecondPoolRows
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame, Timings
from kvscope_telemetry.state.cache_state import CacheState, KnownRequest

_OFFLOADED_WITHIN: Final = 16
"""Steps after a request ended in which vLLM may still offload its last blocks."""
_ABORTED: Final = "FINISHED_ABORTED"
_REASONS: Final = {
    _ABORTED: "aborted",
    "FINISHED_STOPPED": "stopped",
    "FINISHED_LENGTH_CAPPED": "reached its limit of new tokens",
    "FINISHED_IGNORED": "longer than the model's context",
    "FINISHED_ERROR": "ended by an error",
    "FINISHED_REPETITION": "stopped for repeating itself",
}
_NOT_READY: Final = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": WaitsFor.GRAMMAR,
    "WAITING_FOR_REMOTE_KVS": WaitsFor.REMOTE_KV,
    "WAITING_FOR_STREAMING_REQ": WaitsFor.INPUT,
}
_FIRST_ORDER: Final = 1 << 31
"""In the middle, since blocks are queued at both ends."""
_LAST_ORDER: Final = (1 << 32) - 1


@dataclass(slots=True)
class _Known:
    """A request of vLLM's, and what is told of it."""

    theirs: Any
    told: KnownRequest
    waits_since_ns: int
    num_loaded_tokens: int = 0
    """That came, or come, from elsewhere when it started last."""
    places: dict[bytes, int] = field(default_factory=dict)
    """Of its hashes, as many as were looked for: which of them each is."""

    def place_of(self, value: bytes) -> int | None:
        """Which of its hashes this is; None: it is not among them."""
        hashes = self.theirs.block_hashes
        for place in range(len(self.places), len(hashes)):
            self.places.setdefault(hashes[place], place)
        return self.places.get(value)


@dataclass(frozen=True, slots=True)
class _Preemption:
    victim: _Known
    num_tokens: int
    num_blocks: int
    num_free: int
    """Blocks that were free before."""
    num_given_out: int
    """Blocks that had been given out in the step: the next one goes to whom it was for."""
    asked_by: str
    time_ns: int


@dataclass(slots=True)
class _Step:
    """What is gathered for one frame."""

    number: int
    time_ns: int
    evicted: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    """Blocks that were given out, in order."""
    given_to: dict[int, int] = field(default_factory=dict)
    """The request that each of those came to, though it may have given it back before the step was over."""
    preemptions: list[_Preemption] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Blocks that were written, hit or released."""
    ended: list[_Known] = field(default_factory=list)


class Replay:
    """Changes `state` by notes, in their order. `hash_block_size`: tokens that one of a request's hashes is for;
    `by_priority`: the scheduler preempts by priority, not by arrival; `max_adapters`: of a batch, 0 where there are
    none; `blocks_per_place`: blocks that are offloaded to host memory together."""

    def __init__(
        self,
        state: CacheState,
        *,
        hash_block_size: int,
        by_priority: bool = False,
        max_adapters: int = 0,
        blocks_per_place: int = 1,
    ) -> None:
        self.state = state
        self._sizes = state.hello.cache.block_sizes
        self._reserved = state.hello.cache.num_reserved_blocks
        self._hash_block_size = hash_block_size
        self._by_priority, self._max_adapters = by_priority, max_adapters
        self._by_id: dict[str, _Known] = {}
        self._ended: deque[tuple[int, _Known]] = deque()
        """With the step when that was, the last few."""
        self._asked_last: _Known | None = None
        """Whose text a block was that is offloaded."""
        self._evicted_hashes = EvictedHashes()
        self._texts: dict[int, BlockText] = {}
        """By cached block."""
        self._first_texts: dict[bytes, int] = {}
        """By the tokens that texts begin with: the first cached block that holds them."""
        self._waiting: list[_Known] = []
        """Of whom is told what they wait for."""
        self._next_order = [0, 0]
        """Before the first and after the last of them that may be given out."""
        self._host = HostRows(
            state,
            self._texts,
            self._of_text,
            hash_block_size=hash_block_size,
            blocks_per_place=blocks_per_place,
        )
        self._second: SecondPoolRows | None = None
        """Made by the first word of such a pool."""
        self._queue(np.arange(self._reserved, state.hello.cache.num_blocks))

    def apply(self, note: Note) -> Frame:
        """The frame of what the note is about."""
        state = self.state
        step = _Step(state.step + (note.step is not None), note.time_ns)
        decoding = self._decoding(note)
        for word, *about in note.happened:
            _HANDLERS[word](self, step, *about)
        self._tables_of_states(step, note)
        self._figures(step, note)
        self._rows(step, note)
        self._causes(step)
        self._waits(step, note)
        ran = self._ran(note)
        while self._ended and self._ended[0][0] + _OFFLOADED_WITHIN < step.number:
            self._ended.popleft()
            self._asked_last = None
        for known in step.ended:
            self._ended.append((step.number, known))
            if self._by_id.get(known.theirs.request_id) is known:
                del self._by_id[known.theirs.request_id]
        state.totals["num_running"], state.totals["num_waiting"] = len(note.running), note.num_waiting
        state.add_moves("evicted", step.evicted)
        timings = Timings(note.schedule_ns, note.run_ns, 0, note.commit_ns, note.note_ns)
        return state.frame(
            step.number,
            note.time_ns,
            batch=ran,
            num_decode_tokens=sum(ran[number] for number in decoding if number in ran),
            timings=timings if note.step is not None else Timings(),
        )

    def request_id(self, number: int) -> str | None:
        """What vLLM calls a request; None for one that ended."""
        known = self._known(number)
        return None if known is None else str(known.theirs.request_id)

    def contents(self, blocks: Sequence[int]) -> list[BlockContent]:
        """What blocks hold, as far as it is known; no tokens of those that hold nothing."""
        return [self._content(block) for block in blocks]

    def _known(self, number: int) -> _Known | None:
        return next((known for known in self._by_id.values() if known.told.number == number), None)

    def _content(self, block: int) -> BlockContent:
        ledger = self.state.ledger
        if block >= ledger.num_blocks:
            return BlockContent(block=block)
        owner, group = int(ledger.owner[block]), int(ledger.group[block])
        known = self._known(owner)
        if known is not None and block in known.told.tables[group]:
            start = known.told.tables[group].index(block) * self._sizes[group]
            tokens = known.theirs.all_token_ids[start : start + int(ledger.filled[block])]
            notes = notes_of(known.theirs, start, len(tokens))
            return BlockContent(block=block, number=owner, start=start, token_ids=tuple(tokens), notes=notes)
        text = self._texts.get(block)
        if text is None:
            return BlockContent(block=block)
        ids = tuple(text.token_ids)
        return BlockContent(block=block, number=text.number, start=text.start, token_ids=ids, notes=text.notes)

    # What happened, by the words of the notes.

    def _added(self, step: _Step, request: Any) -> None:
        waited_s = max(0.0, time.time() - float(request.arrival_time))
        arrival_ns = max(0, min(step.time_ns, time.monotonic_ns() - int(waited_s * 1e9)))
        told = self.state.add_request(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            arrival_ns=arrival_ns,
            max_tokens=int(request.max_tokens or 0),
            priority=int(request.priority),
            adapter=key_of(request)[0],
        )
        self._by_id[request.request_id] = _Known(request, told, arrival_ns)

    def _scheduled(self, step: _Step, output: Any, time_ns: int) -> None:
        for new in output.scheduled_new_reqs:
            self._started(step, time_ns, new.req_id, new.block_ids, int(new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[place]
            if request_id in cached.resumed_req_ids:
                self._started(step, time_ns, request_id, blocks, int(cached.num_computed_tokens[place]))
            elif blocks is not None and (known := self._by_id.get(request_id)) is not None:
                for group, ids in enumerate(blocks):
                    if ids:
                        self._give(step, known, group, ids, len(known.told.tables[group]))

    def _started(
        self, step: _Step, time_ns: int, request_id: str, blocks: Sequence[Sequence[int]] | None, num_cached: int
    ) -> None:
        known = self._by_id.get(request_id)
        if known is None:
            return
        told, num_prompt = known.told, known.told.info.num_prompt_tokens
        returns = told.num_preemptions > 0
        for group, ids in enumerate(blocks or ()):
            self._give(step, known, group, ids, 0)
        num_known = num_prompt + told.num_output_tokens
        if returns:
            self.state.count(restored_tokens=num_cached, recomputed_tokens=max(0, num_known - num_cached))
        else:
            told.num_cached_tokens = num_cached
            self.state.count(
                admitted=1, prompt_tokens=max(0, num_prompt - num_cached), cached_tokens=min(num_cached, num_prompt)
            )
        before, told.state, told.num_computed_tokens = told.num_computed_tokens, RequestState.RUNNING, num_cached
        missed, token, at_step = self._missed(known.theirs, num_cached, num_known)
        num_loaded = -(-known.num_loaded_tokens // self._sizes[0])
        if known.num_loaded_tokens:
            self._set_filled(step, dict(self._filled(known, 0, num_cached)))
            self._came(known, max(before, num_cached - known.num_loaded_tokens), num_cached)
            known.num_loaded_tokens = 0
        data = EventData(
            kind="started",
            waited_ns=max(0, time_ns - known.waits_since_ns),
            num_known_tokens=num_known,
            num_pool_blocks=max(0, num_cached // self._sizes[0] - num_loaded),
            num_loaded_blocks=num_loaded,
            missed=missed,
            missed_token=token,
            missed_step=at_step,
        )
        event = Event(
            kind="resumed" if returns else "admitted",
            time_ns=time_ns,
            number=told.number,
            num_blocks=self._num_held(known),
            num_tokens=num_cached,
            data=data,
        )
        self.state.add_event(_in_words(event))
        self.state.touch(told)

    def _give(self, step: _Step, known: _Known, group: int, ids: Sequence[int], start: int) -> None:
        """Blocks in a table, `start` on; those that were given out just now are this request's."""
        known.told.set_table(list(ids), group, start)
        at = np.array(ids, np.uint32)
        at = at[at >= self._reserved]
        own = at[self.state.ledger.owner[at] == NO_OWNER]
        self.state.set_blocks(own, owner=known.told.number, group=group)
        step.given_to |= dict.fromkeys(own.tolist(), known.told.number)
        self.state.touch(known.told)

    def _new(self, step: _Step, ids: list[int]) -> None:
        self._evicted(step, ids)
        step.new += ids
        step.used.update(ids)
        self.state.set_blocks(ids, filled=0, owner=NO_OWNER, prefix_hits=0, hash=0, parent=0, eviction_order=0)

    def _last(self, step: _Step, ids: list[int]) -> None:
        start, end = self._next_order[1], self._next_order[1] + len(ids)
        if end > _LAST_ORDER:
            self._queue_anew()
            start, end = self._next_order[1], self._next_order[1] + len(ids)
        self._next_order[1] = end
        self.state.set_blocks(ids, eviction_order=np.arange(start, end, dtype=np.uint32))

    def _first(self, step: _Step, ids: list[int]) -> None:
        if self._next_order[0] <= len(ids):
            self._queue_anew()
        end = self._next_order[0]
        self._next_order[0] = end - len(ids)
        self.state.set_blocks(ids, eviction_order=np.arange(end - len(ids), end, dtype=np.uint32))

    def _queue_anew(self) -> None:
        """At an end of the numbers: from the middle on, in the order in which they are."""
        order = self.state.ledger.eviction_order
        queued = np.flatnonzero(order)
        self._queue(queued[np.argsort(order[queued])])

    def _queue(self, blocks: npt.NDArray[np.intp]) -> None:
        self.state.set_blocks(blocks, eviction_order=_FIRST_ORDER + np.arange(blocks.size, dtype=np.uint32))
        self._next_order = [_FIRST_ORDER, _FIRST_ORDER + blocks.size]

    def _loads(self, step: _Step, request: Any, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        """It holds its blocks while KV comes into them, and waits meanwhile."""
        known = self._by_id.get(request.request_id)
        if known is None:
            return
        for group, ids in enumerate(blocks):
            self._give(step, known, group, ids, 0)
        known.num_loaded_tokens = num_tokens
        self.state.count(loaded_blocks=-(-num_tokens // self._sizes[0]))

    def _hit(self, step: _Step, ids: list[int]) -> None:
        blocks = [block for block in ids if block >= self._reserved]
        step.used.update(blocks)
        self.state.set_blocks(blocks, prefix_hits=self.state.more_hits(blocks), eviction_order=0)

    def _evicted(self, step: _Step, ids: list[int]) -> None:
        """Those of them that have a hash lose it."""
        for block, value in zip(ids, self.state.ledger.hash[ids].tolist(), strict=True):
            if not value:
                continue
            step.evicted.append(block)
            self._forget_text(block)
            self._evicted_hashes.note((value,), step.number)
            self.state.count(evicted_blocks=1)

    def _forget_text(self, block: int) -> None:
        text = self._texts.pop(block, None)
        if text is not None and not text.start and self._first_texts.get(start := text.token_ids.tobytes()) == block:
            del self._first_texts[start]

    def _reset(self, step: _Step) -> None:
        ledger = self.state.ledger
        hashed = np.flatnonzero(ledger.hash[: self.state.hello.cache.num_blocks])
        idle = hashed[ledger.ref_count[hashed] == 0]
        for block in [block for block in self._texts if block < self.state.hello.cache.num_blocks]:
            del self._texts[block]
        self._first_texts.clear()
        self._evicted_hashes.clear()
        self.state.set_blocks(hashed, hash=0, parent=0)
        self.state.free_blocks(idle)
        cause = f"the prefix cache was emptied: {idle.size} cached blocks"
        self.state.add_event(Event(kind="note", time_ns=step.time_ns, num_blocks=int(idle.size), cause=cause))

    def _preempted(
        self, step: _Step, request: Any, num_tokens: int, num_free: int, asked_by: str, time_ns: int
    ) -> None:
        known = self._by_id.get(request.request_id)
        if known is None:
            return
        told, num_blocks = known.told, self._num_held(known)
        step.preemptions.append(_Preemption(known, num_tokens, num_blocks, num_free, len(step.new), asked_by, time_ns))
        self._release(step, told)
        told.state, told.num_computed_tokens = RequestState.PREEMPTED, 0
        told.num_preemptions += 1
        known.waits_since_ns = time_ns
        self.state.count(preemptions=1)

    def _finished(self, step: _Step, request: Any, status: Any, num_outputs: int) -> None:
        known = self._by_id.get(request.request_id)
        if known is None or known.theirs is not request:
            return
        told, num_blocks = known.told, self._num_held(known)
        self.state.tokens_came(known.told, num_outputs, step.time_ns)
        self._release(step, told)
        self.state.finish(told)
        step.ended.append(known)
        is_aborted = status.name == _ABORTED
        self.state.count(aborted=is_aborted, finished=not is_aborted)
        what = _REASONS.get(status.name, status.name.lower())
        event = Event(
            kind="aborted" if is_aborted else "finished",
            time_ns=step.time_ns,
            number=told.number,
            num_blocks=num_blocks,
            cause=f"{what} after {num_outputs} tokens; {num_blocks} blocks released",
        )
        self.state.add_event(event)

    def _num_held(self, known: _Known) -> int:
        return sum(block >= self._reserved for table in known.told.tables for block in table)

    def _release(self, step: _Step, told: KnownRequest) -> None:
        for group, table in enumerate(told.tables):
            step.used.update(block for block in table if block >= self._reserved)
            told.set_table((), group)
        self.state.touch(told)

    def _cached(self, step: _Step, request: Any, group: int, first: int, ids: list[int], block_size: int) -> None:
        """Blocks of a table, from entry `first` on, got hashes."""
        hashes, known = request.block_hashes, self._by_id.get(request.request_id)
        per_block = block_size // self._hash_block_size
        number = 0 if known is None else known.told.number
        for place, block in enumerate(ids, first):
            if block < self._reserved:
                continue
            before, start = place * per_block - 1, place * block_size
            parent = low_bits(hashes[before], group) if 0 <= before < len(hashes) else 0
            own = low_bits(hashes[before + per_block], group) if before + per_block < len(hashes) else 0
            text = self._texts[block] = text_of(request, number, start, block_size)
            if not start and group == 0:
                self._first_texts.setdefault(text.token_ids.tobytes(), block)
            full = min(block_size, self._sizes[group])
            self.state.set_blocks([block], hash=own, parent=parent, filled=full, group=group)

    def _let_go(self, step: _Step, request_id: str, group: int, ids: list[int]) -> None:
        """A window has left these behind: the null block stands in their places."""
        known = self._by_id.get(request_id)
        if known is None:
            return
        table = known.told.tables[group]
        for block in ids:
            if block in table:
                known.told.set_entry(table.index(block), 0, group)
        step.used.update(ids)
        self.state.touch(known.told)

    # What happened in host memory.

    def _stores(
        self, step: _Step, keys: Sequence[bytes], places: Iterable[int], evicted: Sequence[bytes], request_id: str
    ) -> None:
        rows, hashes = self._host.evicted(evicted)
        self._evicted_hashes.note(filter(None, hashes), step.number)
        numbers = self._host.stores(step.number, keys, places, request_id)
        if not rows:
            return
        self.state.add_moves("evicted", rows)
        what = "1 block was" if len(rows) == 1 else f"{len(rows)} blocks were"
        whose = next((number for number in numbers if number), 0)
        cause = f"{what} evicted from host memory, where blocks of request #{whose} are kept now"
        event = Event(kind="evicted", time_ns=step.time_ns, other=whose, num_blocks=len(rows), cause=cause)
        self.state.add_event(event)

    def _stored(self, step: _Step, keys: Iterable[bytes], is_whole: bool) -> None:
        self._host.stored(step.number, keys, is_whole)

    def _skips(self, step: _Step, places: Iterable[int], starts: Sequence[int]) -> None:
        self._host.skips(places, starts)

    def _reads(self, step: _Step, places: Iterable[int]) -> None:
        self._host.reads(step.number, places)

    def _was_read(self, step: _Step, keys: Iterable[bytes]) -> None:
        self._host.was_read(step.number, keys)

    def _below(self, step: _Step, ids: list[int], ref_counts: list[int], hashes: list[Any]) -> None:
        """How blocks of the second pool stand."""
        self._second = self._second or SecondPoolRows(self.state, self._texts, MAX_TEXTS)
        self._evicted_hashes.note(self._second.stand(step.number, ids, ref_counts, hashes), step.number)

    def _emptied(self, step: _Step) -> None:
        count = self._host.emptied()
        cause = f"host memory was emptied: {count} blocks"
        self.state.add_event(Event(kind="note", time_ns=step.time_ns, num_blocks=count, cause=cause))

    def _of_text(self, value: bytes, request_id: str) -> tuple[Any, int, int] | None:
        """Whose text a block's hash is of, as `HostRows` asks."""
        likely = (self._by_id.get(request_id), self._asked_last)  # blocks of a request come one after another
        ended = (known for _, known in reversed(self._ended))
        for known in chain(likely, self._by_id.values(), ended):
            place = None if known is None else known.place_of(value)
            if known is not None and place is not None:
                self._asked_last = known
                return known.theirs, known.told.number, place
        return None

    def _paused(self, step: _Step, by: str) -> None:
        data = EventData(kind="engine_paused", by=by)
        self.state.add_event(_in_words(Event(kind="engine_paused", time_ns=step.time_ns, data=data)))

    def _resumed(self, step: _Step, by: str, lasted_ns: int, why: str) -> None:
        data = EventData(kind="engine_resumed", by=by, lasted_ns=lasted_ns, why=why)
        self.state.add_event(_in_words(Event(kind="engine_resumed", time_ns=step.time_ns, data=data)))

    # How things stand after it.

    def _tables_of_states(self, step: _Step, note: Note) -> None:
        for (request_id, group), ids in note.state_tables.items():
            known = self._by_id.get(request_id)
            if known is not None and known.told.tables[group] != ids:
                self._give(step, known, group, ids, 0)

    def _figures(self, step: _Step, note: Note) -> None:
        """Tokens of each request that runs, and the slots that they fill."""
        filled: dict[int, int] = {}
        for request, computed, num_outputs in zip(note.running, note.computed, note.num_outputs, strict=True):
            known = self._by_id.get(request.request_id)
            if known is None:
                continue
            self.state.tokens_came(known.told, num_outputs, step.time_ns)
            told = known.told
            if told.num_computed_tokens == computed:
                continue
            filled.update(self._filled(known, told.num_computed_tokens, computed))
            told.num_computed_tokens, told.state = computed, RequestState.RUNNING
            self.state.touch(told)
        self._set_filled(step, filled)

    def _filled(self, known: _Known, before: int, computed: int) -> Iterator[tuple[int, int]]:
        """Blocks in which KV came or went when so many of its tokens were computed, and how many slots are filled."""
        low, high = sorted((before, computed))
        for table, size in zip(known.told.tables, self._sizes, strict=True):
            for place in range(low // size, min((high - 1) // size + 1, len(table))):
                if table[place] >= self._reserved:
                    yield table[place], min(max(computed - place * size, 0), size)

    def _set_filled(self, step: _Step, filled: Mapping[int, int]) -> None:
        step.used.update(filled)
        self.state.set_blocks(list(filled), filled=list(filled.values()))

    def _rows(self, step: _Step, note: Note) -> None:
        """What vLLM's own rows say, for all that were touched."""
        last = {block: place for place, block in enumerate(note.blocks) if block >= self._reserved}
        if last:
            ids, places = np.array(list(last), np.uint32), list(last.values())
            refs = np.array([note.ref_counts[place] for place in places], np.int32)
            hashes = np.array([hash_of_row(note.hashes[place]) for place in places], np.uint64)
            state = np.where(refs > 0, BlockState.ACTIVE, np.where(hashes != 0, BlockState.CACHED, BlockState.FREE))
            self.state.set_blocks(ids, state=state, ref_count=refs, hash=hashes)
            self.state.set_blocks(ids[hashes == 0], parent=0)
            free = ids[state == BlockState.FREE]
            self.state.free_blocks(free)
            for block in free.tolist():
                self._forget_text(block)
        self.state.set_blocks(sorted(step.used), last_used_step=step.number)

    def _causes(self, step: _Step) -> None:
        """Events of which is known only now for whom they were."""
        for each in step.preemptions:
            victim, place = each.victim.told, each.num_given_out
            other = step.given_to.get(step.new[place], 0) if place < len(step.new) else victim.number
            choice = "itself" if other == victim.number else "priority" if self._by_priority else "newest"
            data = EventData(kind="preempted", num_available=each.num_free, choice=choice)
            if choice == "priority":
                data = msgspec.structs.replace(data, choice_number=victim.info.priority)
            if each.asked_by:
                data, other = EventData(kind="asked", by=each.asked_by), 0
            event = Event(
                kind="preempted",
                time_ns=each.time_ns,
                number=victim.number,
                other=other,
                num_blocks=each.num_blocks,
                num_tokens=each.num_tokens,
                data=data,
            )
            self.state.add_event(_in_words(event))
        if step.evicted:
            other = step.given_to.get(step.evicted[0], 0)
            what = "1 cached block was" if len(step.evicted) == 1 else f"{len(step.evicted)} cached blocks were"
            event = Event(
                kind="evicted",
                time_ns=step.time_ns,
                other=other,
                num_blocks=len(step.evicted),
                data=EventData(kind="evicted") if other else None,
                cause=f"{what} evicted by request",
            )
            self.state.add_event(_in_words(event))

    def _missed(self, request: Any, num_cached: int, num_known: int) -> tuple[str, int, int]:
        """Why not more of its text was cached: a kind of `EventData.missed`, the token, the step."""
        size = self._sizes[0]
        token, per_block = num_cached // size * size, max(1, size // self._hash_block_size)
        at = token // self._hash_block_size + per_block - 1
        if at >= len(request.block_hashes) or token + size >= num_known:
            return "", 0, 0
        evicted_at = self._evicted_hashes.step_of(low_bits(request.block_hashes[at], 0))
        if evicted_at is not None:
            return "evicted", token, evicted_at
        if not token:
            return self._missed_from_its_start(request), 0, 0
        parent = np.uint64(low_bits(request.block_hashes[at - per_block], 0))
        return ("differs" if (self.state.ledger.parent == parent).any() else "unseen"), token, 0

    def _missed_from_its_start(self, request: Any) -> str:
        tokens = array("i", request.all_token_ids[: self._sizes[0]]).tobytes()
        text = self._texts.get(self._first_texts.get(tokens, -1))
        adapter, salt = key_of(request)
        if text is None or text.key == (adapter, salt):
            return "new"
        return "adapter" if text.key[0] != adapter else "salt"

    def _guessed(self, step: _Step, numbers: list[tuple[str, int, int]]) -> None:
        """Of requests: how many tokens were guessed ahead, and how many came of it, one more than were right."""
        for request_id, num_drafts, num_came in numbers:
            known, num_right = self._by_id.get(request_id), max(0, num_came - 1)
            if known is not None and num_drafts:
                known.told.num_draft_tokens += num_drafts
                known.told.num_accepted_tokens += num_right
                self.state.count(draft_tokens=num_drafts, accepted_tokens=num_right)
                self.state.touch(known.told)

    def _waits(self, step: _Step, note: Note) -> None:
        """What the next one in the queue waits for, and those that could not run if there were room."""
        waiting, self._waiting = self._waiting, []
        first = note.first_waiting
        if first is not None and (known := self._by_id.get(first.request_id)) is not None:
            self._waits_for(known, self._why_first_waits(first, note))
        for request_id, status, num_computed in note.not_ready:
            if status in _NOT_READY and (known := self._by_id.get(request_id)) is not None:
                if _NOT_READY[status] is WaitsFor.REMOTE_KV:
                    known.told.num_computed_tokens = max(0, num_computed - known.num_loaded_tokens)
                self._waits_for(known, _NOT_READY[status])
        still = {known.told.number for known in self._waiting}
        for known in waiting:
            told = known.told
            if told.number in still or told.number not in self.state.requests:
                continue
            if told.waits_for is WaitsFor.REMOTE_KV and told.state is not RequestState.RUNNING:
                self._loaded(step, known)
            told.waits_for = WaitsFor.UNTOLD
            self.state.touch(told)

    def _loaded(self, step: _Step, known: _Known) -> None:
        """Its KV is there; it is in the queue until there is a place for it."""
        before, computed = known.told.num_computed_tokens, known.told.num_computed_tokens + known.num_loaded_tokens
        self._set_filled(step, dict(self._filled(known, before, computed)))
        self._came(known, before, computed)
        known.told.num_computed_tokens = computed

    def _came(self, known: _Known, start: int, end: int) -> None:
        """Tokens `start` to `end` of it were loaded."""
        if start < end:
            self.state.add_moves("loaded", [block for block, _ in self._filled(known, start, end)])

    def _waits_for(self, known: _Known, reason: WaitsFor) -> None:
        self._waiting.append(known)
        told = known.told
        if told.waits_for != reason:
            told.waits_for = reason
            self.state.touch(told)

    def _why_first_waits(self, request: Any, note: Note) -> WaitsFor:
        """A step was made, and it is still first in the queue."""
        if note.step is None:
            return WaitsFor.UNTOLD
        limits = self.state.hello.cache
        if len(note.running) >= limits.max_num_seqs:
            return WaitsFor.PLACE
        if sum(note.step.num_scheduled_tokens.values()) >= limits.max_num_batched_tokens:
            return WaitsFor.BUDGET
        adapter = key_of(request)[0]
        others = {key_of(each)[0] for each in note.running} - {""}
        if adapter and adapter not in others and len(others) >= self._max_adapters > 0:
            return WaitsFor.ADAPTER
        num_needed = sum(-(-request.num_tokens // size) for size in self._sizes)
        return WaitsFor.BLOCKS if note.num_free < num_needed else WaitsFor.UNTOLD

    def _decoding(self, note: Note) -> list[int]:
        """Numbers of those that go on with their answers in the step."""
        if note.step is None:
            return []
        drafts = note.step.scheduled_spec_decode_tokens
        return [
            known.told.number
            for request_id, num_tokens in note.step.num_scheduled_tokens.items()
            if (known := self._by_id.get(request_id)) is not None
            and known.told.num_output_tokens
            and num_tokens <= 1 + len(drafts.get(request_id, ()))
        ]

    def _ran(self, note: Note) -> dict[int, int]:
        scheduled = note.step.num_scheduled_tokens if note.step is not None else {}
        found = [(self._by_id.get(request_id), num_tokens) for request_id, num_tokens in scheduled.items()]
        return {known.told.number: num_tokens for known, num_tokens in found if known is not None}


_HANDLERS: Final[dict[str, Callable[..., None]]] = {
    "added": Replay._added,
    "scheduled": Replay._scheduled,
    "new": Replay._new,
    "hit": Replay._hit,
    "last": Replay._last,
    "first": Replay._first,
    "loads": Replay._loads,
    "guessed": Replay._guessed,
    "evicted": Replay._evicted,
    "reset": Replay._reset,
    "preempted": Replay._preempted,
    "finished": Replay._finished,
    "cached": Replay._cached,
    "let go": Replay._let_go,
    "stores": Replay._stores,
    "stored": Replay._stored,
    "skips": Replay._skips,
    "reads": Replay._reads,
    "was read": Replay._was_read,
    "emptied": Replay._emptied,
    "below": Replay._below,
    "paused": Replay._paused,
    "resumed": Replay._resumed,
}


def _in_words(event: Event) -> Event:
    return msgspec.structs.replace(event, cause=cause_text(event))

"""Makes of vLLM's notes what is told: rows of the ledger, requests with their block tables, events with causes.

Owns what of the past is needed for that: which number a request has, what was evicted when, tokens of cached blocks.
Belongs to the thread that tells; of vLLM's objects it reads only what never changes again, or only grows.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from kvscope_inside.vllm.notes import Note
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame, Timings
from kvscope_telemetry.state.cache_state import CacheState, KnownRequest

MAX_EVICTED_KNOWN: Final = 200_000
"""Hashes of which is remembered when they were evicted, the newest."""
_U8: Final = (1 << 64) - 1
_GROUP_MIX: Final = 0x9E3779B97F4A7C15
"""Keeps apart the hashes that several KV groups have for one text."""
_ABORTED: Final = "FINISHED_ABORTED"
_REASONS: Final = {
    _ABORTED: "aborted",
    "FINISHED_STOPPED": "stopped",
    "FINISHED_LENGTH_CAPPED": "reached its limit of new tokens",
    "FINISHED_IGNORED": "longer than the model's context",
    "FINISHED_ERROR": "ended by an error",
    "FINISHED_REPETITION": "stopped for repeating itself",
}


@dataclass(slots=True)
class _Known:
    """A request of vLLM's, and what is told of it."""

    theirs: Any
    told: KnownRequest
    waits_since_ns: int
    last_token_ns: int = 0


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


@dataclass(slots=True)
class _Step:
    """What is gathered for one frame."""

    number: int
    time_ns: int
    evicted: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    """Blocks that were given out, in order."""
    preemptions: list[_Preemption] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Blocks that were written, hit or released."""
    ended: list[_Known] = field(default_factory=list)
    first_token_ns: list[int] = field(default_factory=list)
    inter_token_ns: list[int] = field(default_factory=list)


class Replay:
    """Changes `state` by notes, in their order. `hash_block_size`: tokens that one of a request's hashes is for;
    `by_priority`: the scheduler preempts by priority, not by arrival."""

    def __init__(self, state: CacheState, *, hash_block_size: int, by_priority: bool = False) -> None:
        self.state = state
        self._sizes = state.hello.cache.block_sizes
        self._reserved = state.hello.cache.num_reserved_blocks
        self._hash_block_size = hash_block_size
        self._by_priority = by_priority
        self._by_id: dict[str, _Known] = {}
        self._evicted_at: OrderedDict[int, int] = OrderedDict()
        self._tokens: dict[int, tuple[int, int, array[int]]] = {}
        """By cached block: its request's number, where its tokens begin, and they."""

    def apply(self, note: Note) -> Frame:
        """The frame of what the note is about."""
        state = self.state
        step = _Step(state.step + (note.step is not None), note.time_ns)
        decoding = self._decoding(note)
        for word, *about in note.happened:
            _HANDLERS[word](self, step, *about)
        self._tables_of_states(note)
        self._figures(step, note)
        self._rows(step, note)
        self._causes(step)
        ran = self._ran(note)
        for known in step.ended:
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
            first_token_ns=step.first_token_ns,
            inter_token_ns=step.inter_token_ns,
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
            return BlockContent(block=block, number=owner, start=start, token_ids=tuple(tokens))
        number, start, ids = self._tokens.get(block, (0, 0, ()))
        return BlockContent(block=block, number=number, start=start, token_ids=tuple(ids))

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
        )
        self._by_id[request.request_id] = _Known(request, told, arrival_ns)

    def _scheduled(self, step: _Step, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._started(step, new.req_id, new.block_ids, int(new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[place]
            if request_id in cached.resumed_req_ids:
                self._started(step, request_id, blocks, int(cached.num_computed_tokens[place]))
            elif blocks is not None and (known := self._by_id.get(request_id)) is not None:
                for group, ids in enumerate(blocks):
                    if ids:
                        self._give(known, group, ids, len(known.told.tables[group]))

    def _started(self, step: _Step, request_id: str, blocks: Sequence[Sequence[int]] | None, num_cached: int) -> None:
        known = self._by_id.get(request_id)
        if known is None:
            return
        told, num_prompt = known.told, known.told.info.num_prompt_tokens
        returns = told.num_preemptions > 0
        for group, ids in enumerate(blocks or ()):
            self._give(known, group, ids, 0)
        num_known = num_prompt + told.num_output_tokens
        if returns:
            self.state.count(restored_tokens=num_cached, recomputed_tokens=max(0, num_known - num_cached))
        else:
            told.num_cached_tokens = num_cached
            self.state.count(
                admitted=1, prompt_tokens=max(0, num_prompt - num_cached), cached_tokens=min(num_cached, num_prompt)
            )
        told.state, told.num_computed_tokens = RequestState.RUNNING, num_cached
        missed, token, at_step = self._missed(known.theirs, num_cached, num_known)
        data = EventData(
            kind="started",
            waited_ns=max(0, step.time_ns - known.waits_since_ns),
            num_known_tokens=num_known,
            num_pool_blocks=num_cached // self._sizes[0],
            missed=missed,
            missed_token=token,
            missed_step=at_step,
        )
        event = Event(
            kind="resumed" if returns else "admitted",
            time_ns=step.time_ns,
            number=told.number,
            num_blocks=sum(map(len, blocks or ())),
            num_tokens=num_cached,
            data=data,
        )
        self.state.add_event(_in_words(event))
        self.state.touch(told)

    def _give(self, known: _Known, group: int, ids: Sequence[int], start: int) -> None:
        """Blocks in a table, `start` on; those that were given out just now are this request's."""
        known.told.set_table(list(ids), group, start)
        at = np.array(ids, np.uint32)
        at = at[at >= self._reserved]
        own = at[self.state.ledger.owner[at] == NO_OWNER]
        self.state.set_blocks(own, owner=known.told.number, group=group)
        self.state.touch(known.told)

    def _new(self, step: _Step, ids: list[int]) -> None:
        self._evicted(step, ids)
        step.new += ids
        step.used.update(ids)
        self.state.set_blocks(ids, filled=0, owner=NO_OWNER, prefix_hits=0, hash=0, parent=0)

    def _hit(self, step: _Step, ids: list[int]) -> None:
        blocks = [block for block in ids if block >= self._reserved]
        step.used.update(blocks)
        hits = self.state.ledger.prefix_hits[blocks].astype(np.uint32) + 1
        self.state.set_blocks(blocks, prefix_hits=np.minimum(hits, (1 << 16) - 1))

    def _evicted(self, step: _Step, ids: list[int]) -> None:
        """Those of them that have a hash lose it."""
        for block, value in zip(ids, self.state.ledger.hash[ids].tolist(), strict=True):
            if not value:
                continue
            step.evicted.append(block)
            self._tokens.pop(block, None)
            self._evicted_at[value] = step.number
            self._evicted_at.move_to_end(value)
            if len(self._evicted_at) > MAX_EVICTED_KNOWN:
                self._evicted_at.popitem(last=False)
            self.state.count(evicted_blocks=1)

    def _reset(self, step: _Step) -> None:
        ledger = self.state.ledger
        hashed = np.flatnonzero(ledger.hash)
        idle = hashed[ledger.ref_count[hashed] == 0]
        self._tokens.clear()
        self._evicted_at.clear()
        self.state.set_blocks(hashed, hash=0, parent=0)
        self.state.free_blocks(idle)
        cause = f"the prefix cache was emptied: {idle.size} cached blocks"
        self.state.add_event(Event(kind="note", time_ns=step.time_ns, num_blocks=int(idle.size), cause=cause))

    def _preempted(self, step: _Step, request: Any, num_tokens: int, num_free: int, asked_by: str) -> None:
        known = self._by_id.get(request.request_id)
        if known is None:
            return
        told, num_blocks = known.told, self._num_held(known)
        step.preemptions.append(_Preemption(known, num_tokens, num_blocks, num_free, len(step.new), asked_by))
        self._release(step, told)
        told.state, told.num_computed_tokens = RequestState.PREEMPTED, 0
        told.num_preemptions += 1
        known.waits_since_ns = step.time_ns
        self.state.count(preemptions=1)

    def _finished(self, step: _Step, request: Any, status: Any, num_outputs: int) -> None:
        known = self._by_id.get(request.request_id)
        if known is None or known.theirs is not request:
            return
        told, num_blocks = known.told, self._num_held(known)
        self._tokens_came(step, known, num_outputs)
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
            parent = _low_bits(hashes[before], group) if 0 <= before < len(hashes) else 0
            own = _low_bits(hashes[before + per_block], group) if before + per_block < len(hashes) else 0
            self._tokens[block] = number, start, array("I", request.all_token_ids[start : start + block_size])
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

    def _paused(self, step: _Step, by: str) -> None:
        data = EventData(kind="engine_paused", by=by)
        self.state.add_event(_in_words(Event(kind="engine_paused", time_ns=step.time_ns, data=data)))

    def _resumed(self, step: _Step, by: str, lasted_ns: int, why: str) -> None:
        data = EventData(kind="engine_resumed", by=by, lasted_ns=lasted_ns, why=why)
        self.state.add_event(_in_words(Event(kind="engine_resumed", time_ns=step.time_ns, data=data)))

    # How things stand after it.

    def _tables_of_states(self, note: Note) -> None:
        for (request_id, group), ids in note.state_tables.items():
            known = self._by_id.get(request_id)
            if known is not None and known.told.tables[group] != ids:
                self._give(known, group, ids, 0)

    def _figures(self, step: _Step, note: Note) -> None:
        """Tokens of each request that runs, and the slots that they fill."""
        blocks: list[int] = []
        filled: list[int] = []
        for request, computed, num_outputs in zip(note.running, note.computed, note.num_outputs, strict=True):
            known = self._by_id.get(request.request_id)
            if known is None:
                continue
            self._tokens_came(step, known, num_outputs)
            told = known.told
            if told.num_computed_tokens == computed:
                continue
            low, high = sorted((told.num_computed_tokens, computed))
            for table, size in zip(told.tables, self._sizes, strict=True):
                for place in range(low // size, min((high - 1) // size + 1, len(table))):
                    if table[place] >= self._reserved:
                        blocks.append(table[place])
                        filled.append(min(max(computed - place * size, 0), size))
            told.num_computed_tokens, told.state = computed, RequestState.RUNNING
            self.state.touch(told)
        step.used.update(blocks)
        self.state.set_blocks(blocks, filled=filled)

    def _tokens_came(self, step: _Step, known: _Known, num_outputs: int) -> None:
        told = known.told
        num_new, told.num_output_tokens = num_outputs - told.num_output_tokens, num_outputs
        if num_new <= 0:
            return
        self.state.count(generation_tokens=num_new)
        if known.last_token_ns:
            step.inter_token_ns += [max(0, step.time_ns - known.last_token_ns) // num_new] * num_new
        else:
            step.first_token_ns.append(max(0, step.time_ns - told.info.arrival_ns))
            step.inter_token_ns += [0] * (num_new - 1)
        known.last_token_ns = step.time_ns
        self.state.touch(told)

    def _rows(self, step: _Step, note: Note) -> None:
        """What vLLM's own rows say, for all that were touched."""
        last = {block: place for place, block in enumerate(note.blocks) if block >= self._reserved}
        if last:
            ids, places = np.array(list(last), np.uint32), list(last.values())
            refs = np.array([note.ref_counts[place] for place in places], np.int32)
            hashes = np.array([_hash_of_row(note.hashes[place]) for place in places], np.uint64)
            state = np.where(refs > 0, BlockState.ACTIVE, np.where(hashes != 0, BlockState.CACHED, BlockState.FREE))
            self.state.set_blocks(ids, state=state, ref_count=refs, hash=hashes)
            self.state.set_blocks(ids[hashes == 0], parent=0)
            free = ids[state == BlockState.FREE]
            self.state.free_blocks(free)
            for block in free.tolist():
                self._tokens.pop(block, None)
        self.state.set_blocks(sorted(step.used), last_used_step=step.number)

    def _causes(self, step: _Step) -> None:
        """Events of which is known only now for whom they were."""
        owner = self.state.ledger.owner
        for each in step.preemptions:
            victim, place = each.victim.told, each.num_given_out
            other = int(owner[step.new[place]]) if place < len(step.new) else victim.number
            choice = "itself" if other == victim.number else "priority" if self._by_priority else "newest"
            data = EventData(kind="preempted", num_available=each.num_free, choice=choice)
            if choice == "priority":
                data = msgspec.structs.replace(data, choice_number=victim.info.priority)
            if each.asked_by:
                data, other = EventData(kind="asked", by=each.asked_by), 0
            event = Event(
                kind="preempted",
                time_ns=step.time_ns,
                number=victim.number,
                other=max(0, other),
                num_blocks=each.num_blocks,
                num_tokens=each.num_tokens,
                data=data,
            )
            self.state.add_event(_in_words(event))
        if step.evicted:
            other = max(0, int(owner[step.evicted[0]]))
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
        evicted_at = self._evicted_at.get(_low_bits(request.block_hashes[at], 0))
        if evicted_at is not None:
            return "evicted", token, evicted_at
        if not token:
            return "new", 0, 0
        parent = np.uint64(_low_bits(request.block_hashes[at - per_block], 0))
        return ("differs" if (self.state.ledger.parent == parent).any() else "unseen"), token, 0

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
    "evicted": Replay._evicted,
    "reset": Replay._reset,
    "preempted": Replay._preempted,
    "finished": Replay._finished,
    "cached": Replay._cached,
    "let go": Replay._let_go,
    "paused": Replay._paused,
    "resumed": Replay._resumed,
}


def _low_bits(value: Any, group: int) -> int:
    """Of a block's hash as many bits as the ledger has, never 0; others in each KV group."""
    number = value if isinstance(value, int) else int.from_bytes(value, "big")
    return (number & _U8) ^ (group * _GROUP_MIX & _U8) or 1


def _hash_of_row(value: Any) -> int:
    """Of a row of vLLM's pool, whose hash has the group's number in its last four bytes; 0: it has none."""
    return 0 if value is None else _low_bits(value[:-4], int.from_bytes(value[-4:], "big"))


def _in_words(event: Event) -> Event:
    return msgspec.structs.replace(event, cause=cause_text(event))

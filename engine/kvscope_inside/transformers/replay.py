"""Makes of transformers' notes what is told: rows of the ledger, requests with their block tables, events with causes.

Owns what of the past is needed for that: which number a request has, what was evicted when, tokens of cached blocks.
Belongs to the thread that tells; of transformers' objects it reads only what never changes again, or only grows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from kvscope_inside.evicted_hashes import EvictedHashes
from kvscope_inside.transformers.facts import Rows
from kvscope_inside.transformers.notes import Note
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame, Timings
from kvscope_telemetry.state.cache_state import CacheState, KnownRequest


@dataclass(slots=True)
class _Known:
    """A request of transformers', and what is told of it."""

    theirs: Any
    """Its RequestState: another one after a soft reset. None: a fork that was not seen to run yet."""
    told: KnownRequest
    waits_since_ns: int
    has_started: bool = False
    """Since it began to wait."""
    was_admitted: bool = False
    """At any time: one that found a prefix may be preempted before it runs."""
    num_hit_tokens: int = 0
    """Found in the prefix cache, since it began to wait."""
    num_released: int = 0
    """Blocks that it let go last."""

    @property
    def num_earlier_tokens(self) -> int:
        """Generated before a soft reset made them a part of its prompt."""
        true = self.theirs._true_initial_tokens
        return len(self.theirs.initial_tokens) - true if true else 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """Of its text."""
        prompt, generated = self.theirs.initial_tokens, self.theirs.generated_tokens
        size = len(prompt)
        return list(prompt[start:stop]) + list(generated[max(0, start - size) : max(0, stop - size)])


@dataclass(slots=True)
class _Step:
    """What is gathered for one frame."""

    number: int
    time_ns: int
    began_ns: int
    evicted: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Blocks that were written, hit or released."""
    preempted: list[tuple[_Known, int, bool]] = field(default_factory=list)
    """By what goes on now: how many tokens each had, and whether its blocks are kept in host memory."""
    starved: str = ""
    """Who could get no block, when blocks were taken from others."""
    ended: dict[str, int] = field(default_factory=dict)
    """Their numbers, by id."""


class Replay:
    """Changes `state` by notes, in their order. `rows`: which row a block is; `hash_of`: as transformers makes a
    block's hash of the one before it and its tokens."""

    def __init__(self, state: CacheState, rows: Rows, hash_of: Callable[[int | None, list[int]], int]) -> None:
        self.state = state
        self._rows, self._hash = rows, hash_of
        self._size = state.hello.cache.block_size
        self._windows = tuple(group.window for group in state.hello.cache.groups)
        self._by_id: dict[str, _Known] = {}
        self._evicted_hashes = EvictedHashes()
        self._tokens: dict[int, tuple[int, int, array[int]]] = {}
        """By row of a block with a hash: its request's number, where its tokens begin, and they."""

    def apply(self, note: Note) -> Frame:
        """The frame of what the note is about."""
        state, is_step = self.state, note.batch is not None
        step = _Step(state.step + is_step, note.time_ns, note.began_ns)
        for word, *about in note.happened:
            _HANDLERS[word](self, step, *about)
        self._figures(step, note)
        self._as_they_stand(step, note)
        ran, num_decode_tokens = self._ran(step, note)
        state.totals["num_running"], state.totals["num_waiting"] = len(note.active), note.num_waiting
        state.add_moves("evicted", step.evicted)
        timings = Timings(note.schedule_ns, note.run_ns, 0, note.commit_ns, note.note_ns)
        return state.frame(
            step.number,
            note.time_ns,
            batch=ran,
            num_decode_tokens=num_decode_tokens,
            timings=timings if is_step else Timings(),
        )

    def contents(self, blocks: Sequence[int]) -> list[BlockContent]:
        """What rows hold, as far as it is known; no tokens of those that hold nothing."""
        return [self._content(block) for block in blocks]

    def _content(self, block: int) -> BlockContent:
        ledger = self.state.ledger
        if block >= ledger.num_blocks:
            return BlockContent(block=block)
        owner, group = int(ledger.owner[block]), int(ledger.group[block])
        known = next((known for known in self._by_id.values() if known.told.number == owner), None)
        if known is not None and known.theirs is not None and block in known.told.tables[group]:
            place = known.told.tables[group].index(block)
            start, stop = self._span(group, place, known.told.num_computed_tokens)
            return BlockContent(block=block, number=owner, start=start, token_ids=tuple(known.tokens(start, stop)))
        number, start, ids = self._tokens.get(block, (0, 0, ()))
        return BlockContent(block=block, number=number, start=start, token_ids=tuple(ids))

    def _span(self, group: int, place: int, num_computed: int) -> tuple[int, int]:
        """Where in its text a block of a table begins and ends. That of a window is a ring: a block that is being
        written over has tokens of two places, and is said to have none."""
        window, start = self._windows[group], place * self._size
        if not window or num_computed <= window:
            return start, min(start + self._size, num_computed)
        lap, end = (num_computed - 1) // window * window, min(start + self._size, window)
        if lap + end <= num_computed:
            return lap + start, lap + end
        return (lap - window + start, lap - window + end) if lap + start >= num_computed else (0, 0)

    # What happened, by the words of the notes.

    def _added(self, step: _Step, theirs: Any) -> None:
        known = self._by_id.get(theirs.request_id)
        if known is not None:  # it was preempted, or its name is used twice
            known.theirs = theirs
            return
        waited_s = max(0.0, time.perf_counter() - float(theirs.created_time))
        arrival_ns = max(0, min(step.time_ns, time.monotonic_ns() - int(waited_s * 1e9)))
        told = self.state.add_request(
            theirs.request_id,
            num_prompt_tokens=theirs._true_initial_tokens or len(theirs.initial_tokens),
            arrival_ns=arrival_ns,
            max_tokens=int(theirs.max_new_tokens or 0),
        )
        known = self._by_id[theirs.request_id] = _Known(theirs, told, arrival_ns)
        told.num_output_tokens = known.num_earlier_tokens + len(theirs.generated_tokens)  # before anybody watched
        told.last_token_ns = step.time_ns if told.num_output_tokens else 0

    def _ran_before(self, step: _Step, request_id: str) -> None:
        """It runs since before anybody watched."""
        known = self._by_id[request_id]
        known.has_started = known.was_admitted = True

    def _sectors(self, step: _Step, group: int, sectors: list[int]) -> None:
        """They are a group's from now on."""
        self.state.set_blocks(self._rows.unused(group, sectors), state=BlockState.UNMAPPED)

    def _freed_sectors(self, step: _Step, sectors: list[int]) -> None:
        size = self._rows.per_sector
        self.state.free_blocks([row for sector in sectors for row in range(sector * size, (sector + 1) * size)])

    def _emptied(self, step: _Step) -> None:
        cache = self.state.hello.cache
        self._tokens.clear()
        self.state.free_blocks(np.arange(cache.num_reserved_blocks, cache.num_blocks))

    def _had_cached(self, step: _Step, group: int, blocks: list[int]) -> None:
        self.state.set_blocks(
            self._rows.of_blocks(group, blocks), state=BlockState.CACHED, filled=self._size, group=group
        )

    def _gave(self, step: _Step, group: int, request_id: str, start: int, blocks: list[int]) -> None:
        known, rows = self._by_id.get(request_id), self._rows.of_blocks(group, blocks)
        step.used.update(rows)
        owner = NO_OWNER
        if known is not None:
            known.told.set_table(rows, group, start)
            self.state.touch(known.told)
            owner = known.told.number
        self._give(rows, group, owner)

    def _give(self, rows: list[int], group: int, owner: int) -> None:
        self.state.set_blocks(
            rows,
            state=BlockState.ACTIVE,
            ref_count=1,
            filled=0,
            owner=owner,
            prefix_hits=0,
            hash=0,
            parent=0,
            group=group,
        )

    def _hit(self, step: _Step, group: int, request_id: str, blocks: list[int], num_tokens: int) -> None:
        known, rows = self._by_id.get(request_id), self._rows.of_blocks(group, blocks)
        step.used.update(rows)
        self.state.set_blocks(rows, state=BlockState.ACTIVE, prefix_hits=self.state.more_hits(rows))
        if known is not None:
            known.told.set_table(rows, group)
            known.num_hit_tokens = num_tokens
            self.state.touch(known.told)

    def _scheduled(self, step: _Step, states: list[Any], offsets: list[int]) -> None:
        for theirs, num_there in zip(states, offsets, strict=True):
            known = self._by_id.get(theirs.request_id)
            if known is not None and not known.has_started:
                self._started(step, known, num_there)

    def _started(self, step: _Step, known: _Known, num_there: int) -> None:
        told, num_prompt = known.told, known.told.info.num_prompt_tokens
        num_known = num_prompt + told.num_output_tokens
        returns = known.was_admitted
        if returns:
            self.state.count(restored_tokens=num_there, recomputed_tokens=max(0, num_known - num_there))
        else:
            told.num_cached_tokens = num_there
            self.state.count(admitted=1, prompt_tokens=max(0, num_prompt - num_there), cached_tokens=num_there)
        missed, token, at_step = self._missed(known, num_there, num_known)
        num_loaded = 0 if known.num_hit_tokens else -(-num_there // self._size) * len(told.tables)
        self.state.count(loaded_blocks=num_loaded)
        data = EventData(
            kind="started",
            waited_ns=max(0, step.began_ns - known.waits_since_ns),
            num_known_tokens=num_known,
            num_pool_blocks=num_there // self._size if known.num_hit_tokens else 0,
            num_loaded_blocks=num_loaded,
            missed=missed,
            missed_token=token,
            missed_step=at_step,
        )
        self._tell(
            Event(
                kind="resumed" if returns else "admitted",
                time_ns=step.began_ns,
                number=told.number,
                num_blocks=sum(map(len, told.tables)),
                num_tokens=num_there,
                data=data,
            )
        )
        known.has_started = known.was_admitted = True
        told.state, told.num_computed_tokens = RequestState.RUNNING, known.num_hit_tokens
        self.state.touch(told)

    def _shared(self, step: _Step, group: int, request_id: str, blocks: list[int], copied: list[int]) -> None:
        """A fork's table: the last ones are its own."""
        told = self._fork(request_id, step).told
        rows, own = self._rows.of_blocks(group, blocks), self._rows.of_blocks(group, copied)
        self._give(own, group, told.number)
        told.set_table(rows, group)
        step.used.update(rows)
        self.state.add_moves("copied", own)
        self.state.count(copied_blocks=len(own))

    def _fork(self, request_id: str, step: _Step) -> _Known:
        """Its blocks are told of before it is."""
        known = self._by_id.get(request_id)
        if known is None:
            parent = self._by_id[request_id.rpartition("__child#")[0]].told
            told = self.state.add_request(
                request_id,
                num_prompt_tokens=parent.info.num_prompt_tokens,
                arrival_ns=parent.info.arrival_ns,
                max_tokens=parent.info.max_tokens,
                index=int(request_id.rpartition("#")[2]) + 1,
            )
            known = self._by_id[request_id] = _Known(None, told, step.began_ns, has_started=True, was_admitted=True)
        return known

    def _forked(self, step: _Step, parent: Any, request_id: str, place: int, num_computed: int) -> None:
        known, of = self._fork(request_id, step), self._by_id[parent.request_id].told
        told = known.told
        known.num_hit_tokens = told.num_cached_tokens = num_computed
        num_prompt = told.info.num_prompt_tokens
        self.state.count(admitted=1, prompt_tokens=num_prompt - num_computed, cached_tokens=num_computed)
        num_shared = sum(self.state.ledger.owner[row] != told.number for table in told.tables for row in table)
        data = EventData(kind="forked")
        event = Event(kind="admitted", time_ns=step.time_ns, number=told.number, other=of.number, data=data)
        self._tell(msgspec.structs.replace(event, num_blocks=int(num_shared), num_tokens=num_computed))

    def _hashed(
        self,
        step: _Step,
        group: int,
        request_id: str,
        first: int,
        blocks: list[int],
        hashes: list[int],
        parent: int,
    ) -> None:
        """Entries of a table, from `first` on, as they are once full blocks have their hashes. A block that another
        already held the same of has given way to that one."""
        known, rows = self._by_id.get(request_id), self._rows.of_blocks(group, blocks)
        parents = [parent, *hashes]
        for place, (row, own, before) in enumerate(zip(rows, hashes, parents[:-1], strict=True), first):
            if known is not None and known.told.tables[group][place] != row:
                known.told.set_entry(place, row, group)
                self.state.touch(known.told)
            if own:
                self.state.set_blocks([row], hash=own, parent=before, filled=self._size, group=group)
                step.used.add(row)
                if known is not None and row not in self._tokens:
                    start = place * self._size
                    tokens = array("i", known.tokens(start, start + self._size))
                    self._tokens[row] = known.told.number, start, tokens

    def _released(self, step: _Step, group: int, request_id: str) -> None:
        known = self._by_id.get(request_id)
        if known is None:
            return
        table = known.told.tables[group]
        step.used.update(table)
        known.num_released += len(table)
        known.told.set_table((), group)
        self.state.touch(known.told)

    def _freed(self, step: _Step, group: int, blocks: list[int]) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self._forget(step, rows)
        self.state.free_blocks(rows)

    def _evicted(self, step: _Step, group: int, blocks: list[int], for_starved: bool) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self._forget(step, rows)
        self.state.set_blocks(rows, hash=0, parent=0)
        step.evicted += rows
        self.state.count(evicted_blocks=len(rows))
        other = self._by_id.get(step.starved) if for_starved else None
        what = "the only cached block was" if len(rows) == 1 else f"all {len(rows)} cached blocks were"
        why = "a request could get no block" if for_starved else "too little of the pool was free (safety_margin)"
        self._tell(
            Event(
                kind="evicted",
                time_ns=step.began_ns,
                other=other.told.number if other is not None else 0,
                num_blocks=len(rows),
                cause=f"{why}; {what} evicted",
            )
        )

    def _forget(self, step: _Step, rows: list[int]) -> None:
        """Those of them that have a hash lose it."""
        for row, value in zip(rows, self.state.ledger.hash[rows].tolist(), strict=True):
            if value:
                self._tokens.pop(row, None)
                self._evicted_hashes.note((value,), step.number)

    def _starved(self, step: _Step, request_id: str) -> None:
        step.starved = request_id

    def _preempted(self, step: _Step, theirs: Any, is_swapped: bool, num_tokens: int) -> None:
        known = self._by_id.get(theirs.request_id)
        if known is None:
            return
        told = known.told
        told.state, told.num_computed_tokens = RequestState.PREEMPTED, 0
        told.num_preemptions += 1
        known.has_started, known.num_hit_tokens, known.waits_since_ns = False, 0, step.time_ns
        step.preempted.append((known, num_tokens, is_swapped))
        self.state.count(preemptions=1, swapped_blocks=known.num_released if is_swapped else 0)
        self.state.touch(told)

    def _offloaded(self, step: _Step, request_id: str, num_free: int) -> None:
        """Who had to go is known, and who is served by it: the first that had got no block and stays."""
        other = self._by_id.get(request_id)
        for known, num_tokens, is_swapped in step.preempted:
            data = EventData(
                kind="preempted",
                num_available=num_free,
                choice="itself" if other is None or other is known else "newest",
                is_swapped=is_swapped,
            )
            event = Event(
                kind="preempted",
                time_ns=step.began_ns,
                number=known.told.number,
                other=(other or known).told.number,
                num_blocks=known.num_released,
                num_tokens=num_tokens,
                data=data,
            )
            self._tell(event)
            known.num_released = 0
        step.preempted.clear()

    def _ended(self, step: _Step, request_id: str, status: str, error: str | None, num_generated: int) -> None:
        known = self._by_id.pop(request_id, None)
        if known is None:
            return
        told, is_finished = known.told, status == "FINISHED"
        step.ended[request_id] = told.number
        self._tokens_came(step, known, num_generated)
        num_blocks = known.num_released + sum(map(len, told.tables))  # an error ends it before it lets go
        self.state.finish(told)
        self.state.count(aborted=not is_finished, finished=is_finished)
        what = self._why(known) if is_finished else error or "cancelled"
        self._tell(
            Event(
                kind="finished" if is_finished else "aborted",
                time_ns=step.time_ns,
                number=told.number,
                num_blocks=num_blocks,
                cause=f"{what} after {told.num_output_tokens} tokens; {num_blocks} blocks released",
            )
        )

    @staticmethod
    def _why(known: _Known) -> str:
        generated = known.theirs.generated_tokens if known.theirs is not None else []
        is_stop = bool(generated) and generated[-1] in known.theirs._eos_token_ids
        return "stopped" if is_stop else "reached its limit of new tokens"

    def _forgot_requests(self, step: _Step) -> None:
        for request_id, known in list(self._by_id.items()):
            num_generated = len(known.theirs.generated_tokens) if known.theirs is not None else 0
            self._ended(step, request_id, "", "the generation loop began anew", num_generated)

    def _tell(self, event: Event) -> None:
        self.state.add_event(msgspec.structs.replace(event, cause=cause_text(event)))

    # How things stand after it.

    def _figures(self, step: _Step, note: Note) -> None:
        """Tokens of each request that runs, and the slots that they fill."""
        rows: list[int] = []
        filled: list[int] = []
        for theirs, computed, num_generated in zip(note.active, note.computed, note.num_generated, strict=True):
            known = self._by_id.get(theirs.request_id)
            if known is None:
                continue
            known.theirs, told = theirs, known.told
            self._tokens_came(step, known, num_generated)
            if told.num_computed_tokens == computed and told.state == RequestState.RUNNING:
                continue
            for table, window in zip(told.tables, self._windows, strict=True):
                most = min(computed, window or computed)
                for place in self._written(told.num_computed_tokens, computed, window):
                    if place < len(table):
                        rows.append(table[place])
                        filled.append(min(max(most - place * self._size, 0), self._size))
            told.num_computed_tokens, told.state = computed, RequestState.RUNNING
            self.state.touch(told)
        step.used.update(rows)
        self.state.set_blocks(rows, filled=filled)

    def _written(self, before: int, now: int, window: int) -> Sequence[int]:
        """Entries of a table that tokens `before` to `now` are in: a window's is a ring."""
        low, high = sorted((before, now))
        if not window:
            return range(low // self._size, -(-high // self._size))
        return sorted({at % window // self._size for at in range(max(low, high - window), high)})

    def _tokens_came(self, step: _Step, known: _Known, num_generated: int) -> None:
        num_earlier = known.num_earlier_tokens if known.theirs is not None else 0
        self.state.tokens_came(known.told, num_generated + num_earlier, step.time_ns)

    def _as_they_stand(self, step: _Step, note: Note) -> None:
        """What transformers' own ledger says, for all blocks that were touched and are not free."""
        ledger = self.state.ledger
        for group, (blocks, ref_counts, hashes) in enumerate(note.touched):
            rows = np.array(self._rows.of_blocks(group, blocks), np.uint32)
            is_held = (ledger.state[rows] != BlockState.FREE) & (ledger.group[rows] == group)
            refs, own = np.array(ref_counts, np.int32)[is_held], np.array(hashes, np.uint64)[is_held]
            state = np.where(refs > 0, BlockState.ACTIVE, BlockState.CACHED)
            self.state.set_blocks(rows[is_held], state=state, ref_count=refs, hash=own)
        self.state.set_blocks(sorted(step.used), last_used_step=step.number)

    def _missed(self, known: _Known, num_there: int, num_known: int) -> tuple[str, int, int]:
        """Why not more of its text was cached: a kind of `EventData.missed`, the token, the step."""
        if not self.state.hello.cache.prefix_caching or known.theirs is None:
            return "", 0, 0
        token = num_there // self._size * self._size
        if token + self._size >= num_known:
            return "", 0, 0
        parent = int(self.state.ledger.hash[known.told.tables[0][token // self._size - 1]]) if token else None
        if parent == 0:
            return "", 0, 0
        evicted_at = self._evicted_hashes.step_of(self._hash(parent, known.tokens(token, token + self._size)))
        if evicted_at is not None:
            return "evicted", token, evicted_at
        if parent is None:
            return "new", 0, 0
        return ("differs" if (self.state.ledger.parent == np.uint64(parent)).any() else "unseen"), token, 0

    def _ran(self, step: _Step, note: Note) -> tuple[dict[int, int], int]:
        """Tokens of each request in the batch, by number, and how many of them are decodes."""
        ran: dict[int, int] = {}
        num_decode_tokens = 0
        for each in note.batch or ():
            known = self._by_id.get(each.request_id)
            number = known.told.number if known is not None else step.ended.get(each.request_id)
            if number is not None:
                ran[number] = each.num_tokens
                num_decode_tokens += each.num_tokens if each.is_decode else 0
        return ran, num_decode_tokens


_HANDLERS: Final[dict[str, Callable[..., None]]] = {
    "added": Replay._added,
    "ran before": Replay._ran_before,
    "sectors": Replay._sectors,
    "freed sectors": Replay._freed_sectors,
    "emptied": Replay._emptied,
    "had cached": Replay._had_cached,
    "gave": Replay._gave,
    "hit": Replay._hit,
    "scheduled": Replay._scheduled,
    "shared": Replay._shared,
    "forked": Replay._forked,
    "hashed": Replay._hashed,
    "released": Replay._released,
    "freed": Replay._freed,
    "evicted": Replay._evicted,
    "starved": Replay._starved,
    "preempted": Replay._preempted,
    "offloaded": Replay._offloaded,
    "ended": Replay._ended,
    "forgot requests": Replay._forgot_requests,
}

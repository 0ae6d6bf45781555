"""Slots for the states of recurrent layers: each running request has one, and the others keep checkpoints of prefixes.

A state stands for all tokens before it and cannot be taken apart, so a cached prefix is of use only up to a place
where a state was kept: a *checkpoint*, found by the digest of the prefix's last block. It is copied to a request that
goes on from there. Owns who has which slot, which checkpoints there are, and the order in which they are evicted (the
least recently used first). Knows no tensors: copies are asked for in the step's plan. Each slot has a row in the
ledger of the block pool, behind all others, in a KV group of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvscope_engine.policy.blocks.block_pool import MAX_PREFIX_HITS, BlockPool
from kvscope_engine.policy.kv_groups import group_digest
from kvscope_engine.policy.plan import Scheduled, StateSave
from kvscope_engine.policy.prefixes.prefix_index import Prefix, published_hash
from kvscope_engine.policy.request import Request
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE


def most_told(max_model_len: int) -> int:
    """Tokens that the ledger can say a state is of."""
    return min(max_model_len, MAX_BLOCK_SIZE)


class StatePool:
    """A slot for each row that `pool` has for states. With `keeps` they are kept at block boundaries, for prefixes to
    be found again:

    - before the last block of a prompt that is full and is not its end, where the same prompt and the next turn of a
      conversation go on;
    - where the text of a prompt parted from one that was seen before, since a third is likely to part there, too;
    - every `interval` tokens, rounded up to whole blocks.

    Each costs a copy of one state, and its slot until it is evicted. A row says of how many tokens it is the state, at
    most `max_tokens`.
    """

    def __init__(self, pool: BlockPool, interval: int, max_tokens: int, *, keeps: bool) -> None:
        self.num_slots = pool.num_states
        self.block_size = pool.block_size
        self.interval = -(-interval // self.block_size) * self.block_size
        self.group = len(pool.groups)
        """KV group of its rows."""
        self._pool = pool
        self._max_tokens = max_tokens
        self._keeps = keeps
        pool.ledger.group[pool.first_state :] = self.group
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[Request, int, int]] = []
        self._waiting: set[int] = set()
        """Slots that nobody has and that are still to be copied from."""
        self._saving: dict[int, StateSave] = {}
        self.num_kept = 0
        self.num_restored = 0
        self.num_evicted = 0
        """Of checkpoints, since the start."""
        self._evicted_for: list[int] = []

    @property
    def num_checkpoints(self) -> int:
        """Prefixes whose state is kept."""
        return len(self._checkpoints)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing of use."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that a request could be given now."""
        return len(self._free) + sum(slot not in self._sources for slot in self._checkpoints.values())

    def checkpoints(self, digests: Sequence[bytes]) -> Iterator[int]:
        """How many of the first blocks of a text can be gone on from, most first."""
        return (count for count in range(len(digests), 0, -1) if digests[count - 1] in self._checkpoints)

    def begin(self, request: Request, digest: bytes | None) -> None:
        """A slot for a request that starts to run: from nothing, or from the checkpoint of `digest`.

        There must be one (`num_available`); the checkpoint itself becomes the request's where there is no other.
        """
        assert request.state_slot < 0, f"request {request.number} has a state"
        if digest is None:
            self._give(request, self._take(request))
            return
        source = self._checkpoints[digest]
        self._checkpoints.move_to_end(digest)
        self.num_restored += 1
        if not self._free and self.num_available == 1 and source not in self._sources:
            del self._checkpoints[digest]
            self._give(request, source)
            return
        ledger, row = self._pool.ledger, self.row(source)
        ledger.prefix_hits[row] = min(int(ledger.prefix_hits[row]) + 1, MAX_PREFIX_HITS)
        ledger.last_used_step[row] = self._pool.step
        self._pool.touch_one(row)
        self._copy(source, request)

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on from where the parent is."""
        assert child.state_slot < 0, f"request {child.number} has a state"
        self._copy(parent.state_slot, child)

    def row(self, slot: int) -> int:
        """Of the ledger."""
        return self._pool.first_state + slot

    def prefix(self, row: int) -> Prefix | None:
        """What the last block before a kept state holds, while the pool has it; None for every other row."""
        slot, pool = row - self._pool.first_state, self._pool
        digest = next((digest for digest, kept in self._checkpoints.items() if kept == slot), b"")
        block = pool.index.get(digest) if pool.index is not None else None
        return None if block is None else pool.prefix(block)

    def release(self, request: Request) -> None:
        """Its state is of no use any more."""
        if request.state_slot < 0:
            return
        self._copies = [copy for copy in self._copies if copy[0] is not request]
        self._write(request.state_slot, BlockState.FREE, NO_OWNER, 0)
        self._give_back(request.state_slot)
        request.state_slot, request.state_tables = -1, [[]]
        for slot in self._waiting - self._sources:
            self._waiting.remove(slot)
            self._free.append(slot)

    def plan(self, scheduled: Iterable[Scheduled]) -> tuple[tuple[tuple[int, int], ...], tuple[StateSave, ...]]:
        """Of the step that is being planned: copies (from, to) before it, and states to be kept amid it."""
        copies = tuple((source, target) for _, source, target in self._copies)
        sources = self._sources
        saves = tuple(self._saves(scheduled, sources)) if self._keeps else ()
        self._copies.clear()
        self._free += self._waiting
        self._waiting.clear()
        return copies, saves

    def commit(self, scheduled: Iterable[Scheduled], saves: Iterable[StateSave]) -> None:
        """The step was run, and its blocks are sealed: what it kept can be found from now on."""
        running = [item.request for item in scheduled if item.request.state_slot >= 0]
        rows = np.array([self.row(request.state_slot) for request in running], np.int64)
        counts = [min(request.num_computed_tokens, self._max_tokens) for request in running]
        self._pool.ledger.filled[rows] = counts
        self._pool.ledger.last_used_step[rows] = self._pool.step
        self._pool.touch(rows)
        for save in saves:
            request, slot = save.request, save.slot
            digest = self._digest(request, save.num_tokens)
            del self._saving[slot]
            if digest is None or digest in self._checkpoints:
                self._free.append(slot)
            else:
                self._checkpoints[digest] = slot
                self.num_kept += 1
                before = self._digest(request, save.num_tokens - self.block_size) or b""
                self._write(slot, BlockState.CACHED, request.number, save.num_tokens, digest, before)
                self._pool.moves.copied([self.row(slot)])

    def take_evicted(self) -> list[int]:
        """Of each checkpoint that was evicted since the last call, the request that got its slot."""
        evicted, self._evicted_for = self._evicted_for, []
        return evicted

    def drop_uncommitted(self) -> None:
        """Whatever was to be kept by a step that never came back."""
        self._free += self._saving
        self._saving.clear()

    def reset(self) -> int:
        """Forget all checkpoints; returns how many there were."""
        kept = {digest: slot for digest, slot in self._checkpoints.items() if slot in self._sources}
        count = len(self._checkpoints) - len(kept)
        for slot in (slot for digest, slot in self._checkpoints.items() if digest not in kept):
            self._free.append(slot)
            self._write(slot, BlockState.FREE, NO_OWNER, 0)
        self._checkpoints = OrderedDict(kept)
        return count

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each slot is exactly one of: free, a request's, a checkpoint, waiting, saving."""
        running = [request for request in requests if request.state_slot >= 0]
        held = [request.state_slot for request in running]
        slots = [*self._free, *held, *self._checkpoints.values(), *self._waiting, *self._saving]
        assert sorted(slots) == list(range(self.num_slots)), f"slots of states do not add up: {sorted(slots)}"
        for request, _, target in self._copies:
            assert request.state_slot == target, f"a state is copied to {target} for request {request.number}"
        ledger = self._pool.ledger.part(self._pool.first_state, self._pool.first_state + self.num_slots)
        expected = np.full(self.num_slots, BlockState.FREE, np.uint8)
        expected[held], expected[list(self._checkpoints.values())] = BlockState.ACTIVE, BlockState.CACHED
        assert (ledger.state == expected).all(), f"rows of states disagree: {ledger.state.tolist()} {expected.tolist()}"
        assert (ledger.ref_count == (expected == BlockState.ACTIVE)).all(), "a state is held otherwise than once"
        assert ledger.owner[held].tolist() == [request.number for request in running], "a state is another's"
        assert (ledger.group == self.group).all(), "a state is of another KV group"
        assert (expected != BlockState.FREE)[ledger.filled > 0].all(), "a free slot has tokens"
        hashes = {slot: published_hash(group_digest(digest, self.group)) for digest, slot in self._checkpoints.items()}
        assert hashes == {int(slot): int(ledger.hash[slot]) for slot in np.flatnonzero(ledger.hash)}, "hashes disagree"
        for request in running:
            assert request.state_tables == [[self.row(request.state_slot)]], "a table has another state"

    @property
    def _sources(self) -> set[int]:
        return {source for _, source, _ in self._copies}

    def _saves(self, scheduled: Iterable[Scheduled], sources: set[int]) -> Iterator[StateSave]:
        places = [(item.request, place) for item in scheduled for place in self._places(item)]
        for request, place in places:
            is_known = self._digest(request, place) in self._checkpoints
            if is_known or not (self._free or self._evictable(sources)):
                continue
            save = StateSave(request, place, self._take(request, of_last=True))
            self._saving[save.slot] = save
            yield save

    def _places(self, item: Scheduled) -> list[int]:
        """Tokens after which the state is kept, those of most use first."""
        request, size, start = item.request, self.block_size, item.start
        end = start + item.num_tokens
        turn = (request.num_prompt_tokens - 1) // size * size
        every = range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        wanted = dict.fromkeys((turn, request.parted_at, *reversed(every)))
        return [place for place in wanted if start < place <= end and place % size == 0]

    def _digest(self, request: Request, place: int) -> bytes | None:
        number = place // self.block_size - 1
        return request.block_digests[number] if 0 <= number < len(request.block_digests) else None

    def _evictable(self, sources: set[int]) -> bool:
        return any(slot not in sources for slot in self._checkpoints.values())

    def _copy(self, source: int, request: Request) -> None:
        """The request goes on from a copy."""
        self._copies.append((request, source, -1))  # already: what is copied from is not taken
        slot = self._take(request)
        self._copies[-1] = (request, source, slot)
        self._give(request, slot)
        self._pool.moves.copied([self.row(slot)])

    def _give(self, request: Request, slot: int) -> None:
        request.state_slot, request.state_tables = slot, [[self.row(slot)]]
        self._write(slot, BlockState.ACTIVE, request.number, request.num_computed_tokens)

    def _take(self, request: Request, *, of_last: bool = False) -> int:
        """The first that is free, or the last: those who run lie side by side, apart from checkpoints, as far as can
        be, and decode in place then."""
        if self._free:
            slot = max(self._free) if of_last else min(self._free)
            self._free.remove(slot)
            return slot
        sources = self._sources
        digest = next(digest for digest, slot in self._checkpoints.items() if slot not in sources)
        self.num_evicted += 1
        self._evicted_for.append(request.number)
        slot = self._checkpoints.pop(digest)
        self._write(slot, BlockState.FREE, NO_OWNER, 0)
        self._pool.moves.evicted([self.row(slot)])
        return slot

    def _write(
        self, slot: int, state: BlockState, owner: int, num_tokens: int, digest: bytes = b"", before: bytes = b""
    ) -> None:
        """A slot's row of the ledger; `digest` and `before` as they are in the first KV group."""
        ledger, row = self._pool.ledger, self.row(slot)
        ledger.state[row], ledger.ref_count[row] = state, state is BlockState.ACTIVE
        ledger.owner[row], ledger.filled[row] = owner, min(num_tokens, self._max_tokens)
        ledger.last_used_step[row], ledger.prefix_hits[row] = self._pool.step, 0
        ledger.hash[row] = published_hash(group_digest(digest, self.group)) if digest else 0
        ledger.parent[row] = published_hash(group_digest(before, self.group)) if before else 0
        self._pool.touch_one(row)

    def _give_back(self, slot: int) -> None:
        if slot in self._sources:
            self._waiting.add(slot)
        else:
            self._free.append(slot)

"""Slots for the states of recurrent layers: one for each running request, the others for checkpoints of prefixes.

A recurrent state covers all tokens before it and cannot be split, so a cached prefix can only be used up to a position
where a state was saved: a *checkpoint*, found by the digest of the prefix's last block. It is copied for a request that
resumes from there. Slots in host memory hold the states of swapped-out requests, and checkpoints evicted from the
device.

Owns the assignment of slots, the checkpoints, and their eviction order (least recently used first). Imports no torch:
copies are part of the step's plan, and count as complete when they are requested, since they are made in that order
before the step. Each slot has a row in the ledger of the block pool, after all others, in a separate KV group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvscope_engine.policy.kv_cache.block_pool import MAX_PREFIX_HITS, BlockPool
from kvscope_engine.policy.kv_groups import group_digest
from kvscope_engine.policy.prefixes.prefix_index import Prefix, published_hash
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StateSave
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE


def max_recorded_tokens(max_model_len: int) -> int:
    """Return the largest token count that the ledger can record for a recurrent state of a model with this
    maximum length.
    """
    return min(max_model_len, MAX_BLOCK_SIZE)


class StatePool:
    """Allocates the slots of recurrent states, which are ledger rows of `pool`: first on the device, then in host
    memory.

    With `keeps_checkpoints`, checkpoints are saved at block boundaries:

    - at the last block boundary before the end of a prompt, where the same prompt and the next turn of a conversation
      resume;
    - where the text of a prompt diverged from an earlier one, since a third prompt is likely to diverge there, too;
    - every `interval` tokens, rounded up to whole blocks.

    Each checkpoint costs the copy of one state, and its slot until it is evicted. A ledger row records the number of
    tokens that its state covers, at most `max_tokens`. `copy_seconds` is the time to copy one state to host memory or
    back.
    """

    def __init__(
        self, pool: BlockPool, interval: int, max_tokens: int, *, keeps_checkpoints: bool, copy_seconds: float = 0.0
    ) -> None:
        self.num_slots = pool.num_states
        """Number of slots on the device. Slots with this number or a greater one are in host memory."""
        self.num_host_slots = pool.num_host_states
        self.copy_seconds = copy_seconds
        self.block_size = pool.block_size
        self.interval = -(-interval // self.block_size) * self.block_size
        self.group = len(pool.groups)
        """Number of the KV group of the states' ledger rows."""
        self._pool = pool
        self._max_tokens = max_tokens
        self._keeps_checkpoints = keeps_checkpoints
        pool.ledger.group[pool.first_state :] = self.group
        num_all = self.num_slots + self.num_host_slots
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._free_host = list(range(num_all - 1, self.num_slots - 1, -1))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._host_checkpoints: OrderedDict[bytes, int] = OrderedDict()
        """Slots of checkpoints in host memory, by digest. A checkpoint of the same prefix may be on the device too."""
        self._copies: list[tuple[int, int]] = []
        self._pending_saves: dict[int, StateSave] = {}
        self.num_kept = 0
        self.num_restored = 0
        self.num_evicted = 0
        self.num_offloaded = 0
        """Number of checkpoints moved from the device to host memory since the start, included in `num_evicted`."""
        self.num_swapped = 0
        """Number of states of preempted requests moved to host memory since the start."""
        self.num_loaded = 0
        """Number of states of requests and checkpoints loaded from host memory since the start."""
        self._evicted_for: list[int] = []

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def num_host_checkpoints(self) -> int:
        return len(self._host_checkpoints)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_host(self) -> int:
        return len(self._free_host)

    @property
    def num_available(self) -> int:
        """Number of slots on the device that are free, or become free if checkpoints are evicted."""
        return len(self._free) + len(self._checkpoints)

    @property
    def can_swap_out(self) -> bool:
        return bool(self._free_host or self._host_checkpoints)

    def checkpoints(self, digests: Sequence[bytes], *, include_host: bool) -> Iterator[int]:
        """Yield the numbers of leading blocks after which a text can resume from a checkpoint, largest first.

        `digests` are those of the text's full blocks. `include_host` includes checkpoints in host memory.
        """
        counts = range(len(digests), 0, -1)
        return (count for count in counts if self._has_checkpoint(digests[count - 1], include_host=include_host))

    def load_seconds(self, digest: bytes) -> float:
        """Return the time to load the checkpoint of `digest` to the device, in seconds; 0 if it is on the device."""
        return 0.0 if digest in self._checkpoints else self.copy_seconds

    def allocate(self, request: Request, digest: bytes | None) -> bool:
        """Allocate a slot for a request that starts to run.

        The slot contains a copy of the checkpoint of `digest`, or is empty if `digest` is None. Returns whether the
        checkpoint was loaded from host memory. A slot must be available (`num_available`). If the only available slot
        is that of the checkpoint itself, the request gets this slot, and the checkpoint is evicted.
        """
        assert request.state_slot < 0, f"request {request.number} has a state"
        if digest is None:
            self._assign(request, self._allocate_slot(request))
            return False
        is_on_device = digest in self._checkpoints
        checkpoints = self._checkpoints if is_on_device else self._host_checkpoints
        source = checkpoints.pop(digest)  # so that its slot is not allocated below
        self.num_restored += 1
        if is_on_device and not self.num_available:
            self._evict(digest, source, request)
            self._assign(request, source)
            return False
        self._copy(source, request)
        checkpoints[digest] = source
        self._record_hit(source)
        return not is_on_device

    def fork(self, parent: Request, child: Request) -> None:
        assert child.state_slot < 0, f"request {child.number} has a state"
        self._copy(parent.state_slot, child)

    def swap_out(self, request: Request) -> None:
        """Move the state of a preempted request to host memory, which must have space (`can_swap_out`)."""
        slot = self._allocate_host_slot()
        assert slot is not None, "a state is swapped out without room for it"
        source, request.state_slot = request.state_slot, -1
        self._copy_to_host(source, slot)
        self._clear(source)
        self._write(slot, BlockState.ACTIVE, request.number, request.num_computed_tokens)
        request.saved_state_slot, request.state_tables = slot, ([self.row(slot)],)
        self.num_swapped += 1

    def swap_in(self, request: Request) -> None:
        """Load the state of a swapped-out request to the device, where a slot must be available (`num_available`)."""
        host_slot, request.saved_state_slot = request.saved_state_slot, -1
        self._copy(host_slot, request)
        self._clear(host_slot)

    def row(self, slot: int) -> int:
        return self._pool.first_state + slot

    def prefix(self, row: int) -> Prefix | None:
        """Return the prefix of the last block before a checkpoint, while the pool caches it; None for any other row."""
        slot, pool = row - self._pool.first_state, self._pool
        checkpoints = self._checkpoints if slot < self.num_slots else self._host_checkpoints
        digest = next((digest for digest, checkpoint_slot in checkpoints.items() if checkpoint_slot == slot), b"")
        block = pool.index.get(digest) if pool.index is not None else None
        return None if block is None else pool.prefix(block)

    def release(self, request: Request) -> None:
        for slot in (request.state_slot, request.saved_state_slot):
            if slot >= 0:
                self._clear(slot)
                request.state_tables = ([],)
        request.state_slot = request.saved_state_slot = -1

    def plan(self, scheduled: Iterable[Scheduled]) -> tuple[tuple[tuple[int, int], ...], tuple[StateSave, ...]]:
        """Return the state copies (from, to) before the planned step, and the checkpoints to save during it."""
        saves = tuple(self._saves(scheduled)) if self._keeps_checkpoints else ()
        copies, self._copies = tuple(self._copies), []
        return copies, saves

    def commit(self, scheduled: Iterable[Scheduled], saves: Iterable[StateSave]) -> None:
        """Record that the step ran and its blocks are sealed. From then on, the step's checkpoints can be found."""
        running = [item.request for item in scheduled if item.request.state_slot >= 0]
        rows = np.array([self.row(request.state_slot) for request in running], np.int64)
        counts = [min(request.num_computed_tokens, self._max_tokens) for request in running]
        self._pool.ledger.filled[rows] = counts
        self._pool.ledger.last_used_step[rows] = self._pool.step
        self._pool.changed_rows.add(rows)
        for save in saves:
            request, slot = save.request, save.slot
            digest = self._digest(request, save.num_tokens)
            del self._pending_saves[slot]
            if digest is None or digest in self._checkpoints:
                self._free.append(slot)
            else:
                self._checkpoints[digest] = slot
                self.num_kept += 1
                before = self._digest(request, save.num_tokens - self.block_size) or b""
                self._write(slot, BlockState.CACHED, request.number, save.num_tokens, digest, before)
                self._pool.moves.record_copied([self.row(slot)])

    def drain_evicted(self) -> list[int]:
        """Return and clear, for each checkpoint evicted from the device, the number of the request that got its
        slot.
        """
        evicted, self._evicted_for = self._evicted_for, []
        return evicted

    def drop_uncommitted(self) -> None:
        """Free the slots reserved for checkpoints of a step that was never committed."""
        self._free += self._pending_saves
        self._pending_saves.clear()

    def reset(self) -> None:
        for slot in (*self._checkpoints.values(), *self._host_checkpoints.values()):
            self._clear(slot)
        self._checkpoints.clear()
        self._host_checkpoints.clear()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each slot is in exactly one state: free, used by a request, a checkpoint,
        or being saved.
        """
        slot_of_request = {
            request: slot for request in requests if (slot := max(request.state_slot, request.saved_state_slot)) >= 0
        }
        assert all(min(request.state_slot, request.saved_state_slot) < 0 for request in slot_of_request), (
            "a state is in two places"
        )
        assert all(request.state_slot < self.num_slots for request in slot_of_request), (
            "a request runs on a state in host memory"
        )
        held, checkpoints = (
            list(slot_of_request.values()),
            [*self._checkpoints.items(), *self._host_checkpoints.items()],
        )
        assert all(slot < self.num_slots for slot in self._checkpoints.values()), "a checkpoint is not on the device"
        cached = [slot for _, slot in checkpoints]
        slots = [*self._free, *self._free_host, *held, *cached, *self._pending_saves]
        num_all = self.num_slots + self.num_host_slots
        assert sorted(slots) == list(range(num_all)), f"slots of states do not add up: {sorted(slots)}"
        assert all(slot >= self.num_slots for slot in (*self._free_host, *self._host_checkpoints.values())), (
            "a slot is elsewhere"
        )
        ledger = self._pool.ledger.part(self._pool.first_state, self._pool.first_state + num_all)
        expected = np.full(num_all, BlockState.FREE, np.uint8)
        expected[held], expected[cached] = BlockState.ACTIVE, BlockState.CACHED
        assert (ledger.state == expected).all(), f"rows of states disagree: {ledger.state.tolist()} {expected.tolist()}"
        assert (ledger.ref_count == (expected == BlockState.ACTIVE)).all(), "a state is held otherwise than once"
        assert ledger.owner[held].tolist() == [request.number for request in slot_of_request], "a state is another's"
        assert (ledger.group == self.group).all(), "a state is of another KV group"
        assert (expected != BlockState.FREE)[ledger.filled > 0].all(), "a free slot has tokens"
        hashes = {slot: published_hash(group_digest(digest, self.group)) for digest, slot in checkpoints}
        assert hashes == {int(slot): int(ledger.hash[slot]) for slot in np.flatnonzero(ledger.hash)}, "hashes disagree"
        for request, slot in slot_of_request.items():
            assert request.state_tables == ([self.row(slot)],), "a table has another state"
            is_swapped = request.saved_state_slot >= 0
            assert is_swapped == bool(request.saved_tables), "blocks or the state alone are swapped out"
            tokens = request.num_saved_tokens if is_swapped else request.num_computed_tokens
            assert ledger.filled[slot] == min(tokens, self._max_tokens), "a state is of other tokens"

    def _has_checkpoint(self, digest: bytes, *, include_host: bool) -> bool:
        return digest in self._checkpoints or (include_host and digest in self._host_checkpoints)

    def _saves(self, scheduled: Iterable[Scheduled]) -> Iterator[StateSave]:
        positions = [(item.request, position) for item in scheduled for position in self._checkpoint_positions(item)]
        for request, position in positions:
            if self._digest(request, position) in self._checkpoints or not self.num_available:
                continue
            save = StateSave(request, position, self._allocate_slot(request, highest=True))
            self._pending_saves[save.slot] = save
            yield save

    def _checkpoint_positions(self, item: Scheduled) -> list[int]:
        """Return the token counts after which to save the state as a checkpoint, the most useful first."""
        request, size, start = item.request, self.block_size, item.start
        end = start + item.num_tokens
        prompt_end = (request.num_prompt_tokens - 1) // size * size
        at_intervals = range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        wanted = dict.fromkeys((prompt_end, request.diverged_at, *reversed(at_intervals)))
        return [position for position in wanted if start < position <= end and position % size == 0]

    def _digest(self, request: Request, position: int) -> bytes | None:
        index = position // self.block_size - 1
        return request.block_digests[index] if 0 <= index < len(request.block_digests) else None

    def _copy(self, source: int, request: Request) -> None:
        slot = self._allocate_slot(request)
        self._copies.append((source, slot))
        self._assign(request, slot)
        if source < self.num_slots:
            self._pool.moves.record_copied([self.row(slot)])
        else:
            self._pool.moves.record_loaded([self.row(slot)])
            self.num_loaded += 1

    def _assign(self, request: Request, slot: int) -> None:
        request.state_slot, request.state_tables = slot, ([self.row(slot)],)
        self._write(slot, BlockState.ACTIVE, request.number, request.num_computed_tokens)

    def _allocate_slot(self, request: Request, *, highest: bool = False) -> int:
        """Allocate the lowest free slot, or with `highest` the highest; if none is free, evict a checkpoint.

        Slots of running requests are thus mostly contiguous and separate from checkpoints, which lets decodes run in
        place.
        """
        if self._free:
            slot = max(self._free) if highest else min(self._free)
            self._free.remove(slot)
            return slot
        digest, slot = self._checkpoints.popitem(last=False)
        self._evict(digest, slot, request)
        return slot

    def _evict(self, digest: bytes, slot: int, request: Request) -> None:
        """Evict a checkpoint, already removed from the index, for a request.

        The checkpoint is offloaded if host memory has space.
        """
        self.num_evicted += 1
        self._evicted_for.append(request.number)
        self._offload(digest, slot)
        self._write(slot, BlockState.FREE, NO_OWNER, 0)
        self._pool.moves.record_evicted([self.row(slot)])

    def _offload(self, digest: bytes, slot: int) -> None:
        if digest in self._host_checkpoints:
            self._host_checkpoints.move_to_end(digest)
        elif (target := self._allocate_host_slot()) is not None:
            ledger, row, host_row = self._pool.ledger, self.row(slot), self.row(target)
            self._write(target, BlockState.CACHED, int(ledger.owner[row]), int(ledger.filled[row]))
            for column in (ledger.hash, ledger.parent, ledger.prefix_hits, ledger.last_used_step):
                column[host_row] = column[row]
            self._copy_to_host(slot, target)
            self._host_checkpoints[digest] = target
            self.num_offloaded += 1

    def _allocate_host_slot(self) -> int | None:
        """Allocate a slot in host memory, dropping a checkpoint if needed. Returns None if requests use all of them."""
        if self._free_host:
            return self._free_host.pop()
        if not self._host_checkpoints:
            return None
        _, slot = self._host_checkpoints.popitem(last=False)
        self._write(slot, BlockState.FREE, NO_OWNER, 0)
        self._pool.moves.record_evicted([self.row(slot)])
        return slot

    def _copy_to_host(self, source: int, target: int) -> None:
        self._copies.append((source, target))
        self._pool.moves.record_saved([self.row(target)])

    def _record_hit(self, slot: int) -> None:
        ledger, row = self._pool.ledger, self.row(slot)
        ledger.prefix_hits[row] = min(int(ledger.prefix_hits[row]) + 1, MAX_PREFIX_HITS)
        ledger.last_used_step[row] = self._pool.step
        self._pool.changed_rows.add_one(row)

    def _clear(self, slot: int) -> None:
        """Free a slot. The next request that gets it writes to it only after all copies requested so far."""
        self._write(slot, BlockState.FREE, NO_OWNER, 0)
        (self._free if slot < self.num_slots else self._free_host).append(slot)

    def _write(
        self, slot: int, state: BlockState, owner: int, num_tokens: int, digest: bytes = b"", before: bytes = b""
    ) -> None:
        """Write a slot's ledger row.

        `digest` and `before` are the digests, in the first KV group, of the checkpoint's last block and of the block
        before it.
        """
        ledger, row = self._pool.ledger, self.row(slot)
        ledger.state[row], ledger.ref_count[row] = state, state is BlockState.ACTIVE
        ledger.owner[row], ledger.filled[row] = owner, min(num_tokens, self._max_tokens)
        ledger.last_used_step[row], ledger.prefix_hits[row] = self._pool.step, 0
        ledger.hash[row] = published_hash(group_digest(digest, self.group)) if digest else 0
        ledger.parent[row] = published_hash(group_digest(before, self.group)) if before else 0
        self._pool.changed_rows.add_one(row)

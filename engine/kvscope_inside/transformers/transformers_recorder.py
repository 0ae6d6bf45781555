"""Records what transformers' continuous batching does, on the generating thread.

A record contains a tuple for each event of a step and, at its end, the state of the blocks that were touched. Owns the
hooks, and decides which attributes of transformers' objects are read. It copies a block table only where transformers
itself iterates over one, reads no device and does not block; the publishing thread (`transformers_translator`) does
everything else.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_telemetry.messages.telemetry import Timings

HostEvent = tuple[Any, ...]
"""An event: its kind and the arguments of its handler, such as ("added", state) or ("gave", group, ...)."""


class BatchEntry(NamedTuple):
    request_id: str
    num_tokens: int
    is_decode: bool


class Touched(NamedTuple):
    """State, after the recorded events, of the blocks of one KV group that were allocated, freed or otherwise changed.

    A block may occur several times; then its last entry is valid. It may be free again.
    """

    blocks: list[int]
    ref_counts: list[int]
    hashes: list[int]
    """Block hashes; 0 for blocks without a hash."""


class TransformersRecord(NamedTuple):
    """Events since the previous record, in order, and the state of the batch processor after them."""

    time_ns: int
    began_ns: int
    """Monotonic time at which the step started or, for a record between two steps, at which the first event
    occurred.
    """
    events: list[HostEvent]
    batch: list[BatchEntry] | None
    """Requests in the step's batch; None for a record between two steps."""
    active: list[Any]
    """RequestState (of transformers) of each running request."""
    computed: list[int]
    """Number of tokens of each running request whose KV is in blocks, or with asynchronous batching will be after the
    step in flight.
    """
    num_generated: list[int]
    num_waiting: int
    touched: list[Touched]
    """One entry per KV group: the state of the blocks that changed since the previous record."""
    timings: Timings | None
    """Durations of the step and of making the previous record; None for a record between two steps."""


class TransformersRecorder:
    """Hooks on one batch processor, installed on construction. They append to `records`, from which the publishing
    thread pops.

    The first record describes the state before the hooks were installed.
    """

    def __init__(self, processor: Any, hooks: Hooks) -> None:
        self.records: deque[TransformersRecord] = deque()
        self.step_started_ns = 0
        self._scheduler = processor.scheduler
        self._cache = processor.cache
        self._allocators = list(processor.cache.cache_allocators.values())
        self._events: list[HostEvent] = []
        self._touched: list[list[int]] = [[] for _ in self._allocators]
        self._batch: list[BatchEntry] = []
        self._is_offloading = False
        self._prepare_started_ns = self._scheduled_ns = self._commit_started_ns = self._recording_ns = 0
        self._record_initial_state()
        self._install_hooks(processor, hooks)

    def flush(self) -> None:
        """Append a record of the events between two steps, if there are any."""
        if self._events or any(self._touched):
            self._record(None, time.monotonic_ns())

    def _record_initial_state(self) -> None:
        """Record the requests, tables and cached blocks that existed before the hooks were installed."""
        for group, allocator in enumerate(self._allocators):
            free = self._cache.pool._free_blocks[group].trees
            held = {block for table in allocator.block_table.values() for block in table}
            in_use = held | set(allocator.ledger.cached_blocks)
            sectors = {block // allocator.blocks_per_sector for block in in_use} | set(free)
            self._events.append(("sectors", group, sorted(sectors)))
        for state in (*self._scheduler.waiting_requests.values(), *self._scheduler.active_requests.values()):
            self._events.append(("added", state))
        self._events += [("ran before", request_id) for request_id in self._scheduler.active_requests]
        for group, allocator in enumerate(self._allocators):
            for request_id, table in allocator.block_table.items():
                self._events.append(("gave", group, request_id, 0, table[:]))
                self._events.append(self._hashes_of(group, request_id, 0, table))
            cached = list(allocator.ledger.cached_blocks)
            self._events.append(("had cached", group, cached))
            self._touched[group] += [block for table in allocator.block_table.values() for block in table]
            self._touched[group] += cached
        self.flush()

    def _install_hooks(self, processor: Any, hooks: Hooks) -> None:
        scheduler, cache, pool = self._scheduler, self._cache, self._cache.pool
        hooks.before(processor, "prepare_next_batch", self._before_prepare)
        hooks.after(processor, "prepare_next_batch", self._after_prepare)
        hooks.before(processor, "update_batch", self._before_update)
        hooks.after(processor, "update_batch", self._after_update)
        hooks.after(processor, "_handle_request_error", self._failed)
        hooks.after(processor, "fail_all_requests", lambda *_, **__: self.flush())
        hooks.after(processor, "reset", self._after_reset)
        hooks.after(processor.inputs_and_outputs, "prepare_batch_update", self._record_batch)
        hooks.after(scheduler, "add_waiting_request", lambda _, state: self._events.append(("added", state)))
        hooks.after(scheduler, "schedule_batch", self._scheduled)
        hooks.around(scheduler, "finish_request", lambda name: scheduler.active_requests.get(name), self._ended)
        hooks.after(scheduler, "clear_cancelled_requests", self._cancelled)
        hooks.around(processor.offloading_manager, "offload_requests", self._before_offload, self._after_offload)
        hooks.after(cache, "prepare_fork_request", self._forked)
        hooks.around(pool, "allocate_sector", lambda index: pool.free_sectors[-1:], self._got_sector)
        hooks.around(pool, "try_to_free_sectors", lambda: len(pool.free_sectors), self._freed_sectors)
        hooks.after(pool, "free_blocks", self._freed)
        hooks.after(pool, "reset", lambda *_, **__: self._events.append(("emptied",)))
        for group, allocator in enumerate(self._allocators):
            _GroupRecorder(self, group, allocator, hooks)

    # Called on the generating thread, within its steps.

    def _before_prepare(self, *_: Any, **__: Any) -> None:
        self._prepare_started_ns = self._scheduled_ns = time.monotonic_ns()

    def _after_prepare(self, has_batch: bool, *_: Any, **__: Any) -> None:
        self._scheduled_ns = time.monotonic_ns()
        if has_batch:
            self.step_started_ns = self._prepare_started_ns
        else:
            self.flush()

    def _before_update(self, *_: Any, **__: Any) -> None:
        self._commit_started_ns = time.monotonic_ns()

    def _record_batch(self, result: Any, *_: Any, **__: Any) -> None:
        self._batch = [
            BatchEntry(each.state.request_id, each.query_length, bool(each.state.generated_tokens))
            for each in result[0]
        ]

    def _after_update(self, *_: Any, **__: Any) -> None:
        self._record(self._batch, self._prepare_started_ns)

    def _scheduled(self, result: Any, *_: Any, **__: Any) -> None:
        if result[0]:
            states = [each.state for each in result[0]]
            self._events.append(("scheduled", states, [state.position_offset for state in states]))

    def _ended(self, state: Any, *_: Any, **__: Any) -> None:
        if state is None:
            return
        if self._is_offloading:
            self._events.append(("preempted", state, state.is_cpu_offloaded, state.position_offset))
        else:
            self._events.append(
                ("ended", state.request_id, state.status.name, state.error, len(state.generated_tokens))
            )

    def _cancelled(self, states: list[Any], *_: Any, **__: Any) -> None:
        self._events += [("ended", each.request_id, "", None, len(each.generated_tokens)) for each in states]

    def _failed(self, result: Any, error: Any, state: Any) -> None:
        self._events.append(("ended", state.request_id, "FAILED", str(error), len(state.generated_tokens)))

    def _after_reset(self, *_: Any, **__: Any) -> None:
        self._events.append(("forgot requests",))
        self.flush()

    def _before_offload(self, *_: Any, **__: Any) -> int:
        """Called before requests are preempted. Returns the number of free blocks."""
        self._is_offloading = True
        starved = self._scheduler.starved_requests
        self._events.append(("starved", starved[0][0].request_id if starved else ""))
        pool = self._cache.pool
        return sum(
            pool.count_free_blocks(group) + pool.num_free_sectors * allocator.blocks_per_sector
            for group, allocator in enumerate(self._allocators)
        )

    def _after_offload(self, num_free: int, *_: Any, **__: Any) -> None:
        self._is_offloading = False
        starved = self._scheduler.starved_requests
        self._events.append(("offloaded", starved[0][0].request_id if starved else "", num_free))

    def _forked(self, request_ids: list[str], parent: Any, *_: Any, **__: Any) -> None:
        for index, request_id in enumerate(request_ids, 1):
            self._events.append(("forked", parent, request_id, index, parent.position_offset))

    def _got_sector(self, sectors: list[int], result: None, index: int) -> None:
        self._events.append(("sectors", index, sectors))

    def _freed_sectors(self, num_free: int, *_: Any, **__: Any) -> None:
        sectors = self._cache.pool.free_sectors[num_free:]
        if sectors:
            self._events.append(("freed sectors", sectors))

    def _freed(self, result: None, index: int, block_ids: list[int]) -> None:
        if block_ids:
            self._events.append(("freed", index, block_ids))

    def touch(self, group: int, blocks: list[int], *events: Any) -> None:
        """Record an event, whose kind and arguments are `events`, and add `blocks` of a KV group to the blocks
        whose state the record will contain.
        """
        self._touched[group] += blocks
        self._events.append(events)

    def complete(self, group: int, request_id: str, first: int, before: list[int]) -> None:
        """Record the hashes of the blocks in a request's table from entry `first` on.

        `before`: the blocks that the table had from that entry on before the hashes were computed.
        """
        table = self._allocators[group].block_table[request_id]
        self._touched[group] += before
        self._touched[group] += table[first : first + len(before)]
        self._events.append(self._hashes_of(group, request_id, first, table[: first + len(before)]))

    def evict(self, group: int, blocks: list[int]) -> None:
        """Record that the cache evicted `blocks`, which are all cached blocks that no request uses."""
        self.touch(group, blocks, "evicted", group, blocks, self._is_offloading)

    def _hashes_of(self, group: int, request_id: str, first: int, table: list[int]) -> HostEvent:
        hash_of = self._allocators[group].ledger.block_to_hash.get
        parent = hash_of(table[first - 1], 0) if first else 0
        blocks = table[first:]
        return "hashed", group, request_id, first, blocks, [hash_of(block, 0) for block in blocks], parent

    def _record(self, batch: list[BatchEntry] | None, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        events, self._events = self._events, []
        touched, self._touched = self._touched, [[] for _ in self._allocators]
        active = list(self._scheduler.active_requests.values())
        self.records.append(
            TransformersRecord(
                now_ns,
                began_ns,
                events,
                batch,
                active,
                [state.position_offset for state in active],
                [len(state.generated_tokens) for state in active],
                len(self._scheduler.waiting_requests),
                [_rows(allocator.ledger, blocks) for allocator, blocks in zip(self._allocators, touched, strict=True)],
                None if batch is None else self._timings(now_ns),
            )
        )
        if batch is not None:
            self.step_started_ns = 0
        self._recording_ns = time.monotonic_ns() - now_ns

    def _timings(self, now_ns: int) -> Timings:
        run_ns = max(0, self._commit_started_ns - self._scheduled_ns)
        return Timings(
            self._scheduled_ns - self._prepare_started_ns,
            run_ns,
            0,
            now_ns - self._commit_started_ns,
            self._recording_ns,
        )


class _GroupRecorder:
    def __init__(self, recorder: TransformersRecorder, group: int, allocator: Any, hooks: Hooks) -> None:
        self._recorder, self._group = recorder, group
        self._tables: dict[str, list[int]] = allocator.block_table
        self._hash_of: dict[int, int] = allocator.ledger.block_to_hash
        hooks.around(allocator, "allocate_cache_to_request", self._num_blocks, self._allocated)
        hooks.around(allocator, "mark_complete_blocks", self._table, self._completed)
        hooks.before(allocator, "free_blocks", self._before_free)
        hooks.after(allocator, "acquire_prefix_blocks", self._hit)
        hooks.after(allocator, "fork_blocks", self._forked)
        hooks.after(allocator.ledger, "evict_cached_blocks", self._evicted)

    def _num_blocks(self, request_id: str, *_: Any, **__: Any) -> int:
        return len(self._tables.get(request_id, ()))

    def _allocated(self, num_before: int, result: None, request_id: str, *_: Any, **__: Any) -> None:
        table = self._tables[request_id]
        if len(table) > num_before:
            new = table[num_before:]
            self._recorder.touch(self._group, new, "gave", self._group, request_id, num_before, new)

    def _table(self, request_id: str, *_: Any, **__: Any) -> list[int]:
        return list(self._tables.get(request_id, ()))

    def _completed(self, before: list[int], result: None, request_id: str, token_ids: Any, new_new_blocks: int) -> None:
        table, end = self._tables[request_id], len(before)
        while end and table[end - 1] not in self._hash_of:
            end -= 1
        first = max(0, end - new_new_blocks)
        self._recorder.complete(self._group, request_id, first, before[first:end])

    def _before_free(self, request_id: str, *_: Any, **__: Any) -> None:
        table = self._tables.get(request_id)
        if table is not None:
            self._recorder.touch(self._group, table[:], "released", self._group, request_id)

    def _hit(self, result: None, request_id: str, prefix_len: int, *_: Any, **__: Any) -> None:
        blocks = self._tables[request_id][:]
        self._recorder.touch(self._group, blocks, "hit", self._group, request_id, blocks, prefix_len)

    def _forked(self, result: Any, source_id: str, request_id: str, *_: Any, **__: Any) -> None:
        table, copied = self._tables[request_id][:], result[1]
        self._recorder.touch(self._group, table, "shared", self._group, request_id, table, copied[:])

    def _evicted(self, blocks: list[int], *_: Any, **__: Any) -> None:
        if blocks:
            self._recorder.evict(self._group, blocks)


def _rows(ledger: Any, blocks: list[int]) -> Touched:
    """Return the state of blocks in transformers' ledger. That ledger has reference counts only for shared
    blocks; any other block that is not merely cached has one reference.
    """
    cached, shared, hash_of = ledger.cached_blocks, ledger.shared_ref_counts.get, ledger.block_to_hash.get
    ref_counts = [0 if block in cached else shared(block, 1) for block in blocks]
    return Touched(blocks, ref_counts, [hash_of(block, 0) for block in blocks])

"""Records what vLLM's scheduler and block pool do, on the engine core's thread.

A record contains a tuple for each event of a step and, at its end, the state of the blocks that were touched. Owns the
hooks, and decides which attributes of vLLM's objects are read. It never copies a complete block table or pool, reads no
device and does not block; the publishing thread (`vllm_translator`) does everything else.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_inside.vllm.offloading import hook_offloading, offloading_of, second_pool
from kvscope_inside.vllm.second_pool import hook_second_pool
from kvscope_telemetry.messages.telemetry import Timings

MAX_NOT_READY: Final = 256
"""Maximum number of requests recorded per step that wait for something other than capacity."""
HostEvent = tuple[Any, ...]
"""An event: its kind and the arguments of its handler, such as ("added", request) or ("scheduled", output, time)."""


class VllmRecord(NamedTuple):
    """Events since the previous record, in order, and the state of the scheduler after them."""

    time_ns: int
    events: list[HostEvent]
    step: Any
    """The SchedulerOutput that was executed; None for a record between two steps."""
    running: list[Any]
    computed: list[int]
    """Number of tokens of each running request whose KV is in blocks, or with async scheduling will be after the step
    in flight.
    """
    num_outputs: list[int]
    num_waiting: int
    first_waiting: Any
    """First request in the waiting queue; None if the queue is empty."""
    not_ready: list[tuple[str, str, int]]
    """Waiting requests that could not run even with free capacity: request id, vLLM's status, and number of computed
    tokens.

    The computed tokens of a request whose KV is being loaded include those being loaded.
    """
    num_free: int
    blocks: list[int]
    """Ids of the blocks that changed, parallel to `ref_counts` and `hashes`. If a block occurs several times,
    its last entry is valid.
    """
    ref_counts: list[int]
    hashes: list[bytes | None]
    state_tables: dict[tuple[str, int], list[int]]
    """Complete block tables of KV groups with recurrent states, by request id and group. Unlike other tables,
    they are not append-only.
    """
    timings: Timings | None
    """Durations of the step and of making the previous record; None for a record between two steps."""


class VllmRecorder:
    """Hooks on one scheduler, installed on construction. They append to `records`, from which the publishing thread
    pops.

    `between_steps` is called on the engine core's thread before each step.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, between_steps: Callable[[], None]) -> None:
        self.records: deque[VllmRecord] = deque()
        self.scheduler = scheduler
        self.asked_by = ""
        """Name of the user who requested the preemptions in progress; empty if vLLM itself preempts."""
        self.step_started_ns = 0
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._between_steps = between_steps
        self._events: list[HostEvent] = []
        self._touched: list[Any] = []
        self._touched_second: list[Any] = []
        self._freeing_for: tuple[str, int] | None = None
        """Request id and KV group while vLLM frees blocks of that request's table; None otherwise."""
        self._is_in_step = False
        self._scheduled_ns = self._schedule_ns = self._commit_started_ns = self._recording_ns = 0
        self._state_groups: list[int] = []
        self._hash_of = _hash_reader(self._pool.blocks[0])
        self._not_ready = "deferred_waiting" if hasattr(scheduler, "deferred_waiting") else "skipped_waiting"
        self._install_hooks(hooks)

    def record_event(self, *events: Any) -> None:
        """Record an event that did not occur in the scheduler or its pool. Called on the engine core's thread."""
        self._events.append(events)

    def flush(self) -> None:
        """Append a record of the events between two steps, if there are any."""
        if self._events or self._touched or self._touched_second:
            self._record(None)

    def _install_hooks(self, hooks: Hooks) -> None:
        scheduler, pool = self.scheduler, self._pool
        hooks.before(scheduler, "schedule", self._before_schedule)
        hooks.after(scheduler, "schedule", self._after_schedule)
        hooks.before(scheduler, "update_from_output", self._before_update)
        hooks.after(scheduler, "update_from_output", self._after_update)
        hooks.after(scheduler, "add_request", self._added)
        hooks.before(scheduler, "_preempt_request", self._preempted)
        hooks.after(scheduler, "_free_request", self._finished)
        hooks.after(scheduler, "finish_requests", lambda *_, **__: self._flush_between_steps())
        hooks.after(pool, "get_new_blocks", self._allocated)
        hooks.after(pool, "touch", self._hit)
        hooks.before(pool, "evict_blocks", self._before_evict)
        hooks.after(pool, "reset_prefix_cache", self._reset)
        self._hook_free(hooks, "free_blocks", pool=pool)
        if hasattr(pool, "unpin_blocks"):
            self._hook_free(hooks, "unpin_blocks", pool=pool)
        queue = pool.free_block_queue
        hooks.after(queue, "append_n", lambda _, blocks: self._record_queued("last", blocks))
        if hasattr(queue, "prepend_n"):
            hooks.after(queue, "prepend_n", lambda _, blocks: self._record_queued("first", blocks))
        if (connector := getattr(scheduler, "connector", None)) is not None:
            hooks.after(connector, "update_state_after_alloc", self._load_started)
        if (offloading := offloading_of(scheduler)) is not None:
            hook_offloading(hooks, offloading, self.record_event)
            hooks.after(scheduler, "reset_prefix_cache", lambda *_, **__: self._flush_between_steps())
        if (second := second_pool(scheduler)) is not None:
            hook_free = partial(self._hook_free, hooks, pool=second.pool, touched=self._touched_second)
            hook_second_pool(hooks, second.pool, self._touched_second, hook_free)
            hooks.after(scheduler, "reset_prefix_cache", lambda *_, **__: self._flush_between_steps())
        cached = self._hook_with_named_arguments(pool, "cache_full_blocks", self._cached)
        if cached is not None:
            hooks.after(pool, "cache_full_blocks", cached)
        for group, manager in enumerate(self._managers):
            name = type(manager.kv_cache_spec).__name__
            if "Mamba" in name:
                self._state_groups.append(group)
            elif not name.startswith(("FullAttention", "MLA")):
                self._hook_skipped_blocks(hooks, manager, group)

    def _hook_free(self, hooks: Hooks, name: str, *, pool: Any, touched: list[Any] | None = None) -> None:
        """Hook the method `name` of `pool`, whose argument may be an iterator, which can be read only once.

        `touched`: list to which freed blocks of the second pool are appended; None for the first pool.
        """
        original = hooks.lookup(pool, name)
        if original is None:
            return

        def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            if not hooks.is_enabled:
                return original(ordered_blocks, *args, **kwargs)
            blocks = list(ordered_blocks)
            result = original(blocks, *args, **kwargs)
            if touched is not None:
                touched.extend(blocks)
                return result
            self._touched += blocks
            if self._freeing_for is not None and blocks:
                self._events.append(("let go", *self._freeing_for, [block.block_id for block in blocks]))
            return result

        hooks.install(pool, name, free_blocks)

    def _hook_skipped_blocks(self, hooks: Hooks, manager: Any, group: int) -> None:
        """Hook the method that frees a request's blocks outside the window and replaces their table entries by
        the null block.
        """
        original = manager.remove_skipped_blocks

        def remove_skipped_blocks(request_id: str, *args: Any, **kwargs: Any) -> Any:
            self._freeing_for = request_id, group
            try:
                return original(request_id, *args, **kwargs)
            finally:
                self._freeing_for = None

        hooks.install(manager, "remove_skipped_blocks", remove_skipped_blocks)

    @staticmethod
    def _hook_with_named_arguments(
        owner: Any, name: str, callback: Callable[[dict[str, Any]], None]
    ) -> Callable[..., None] | None:
        """Return a hook that calls `callback` with a dict of the hooked method's arguments by name; None if the
        method does not exist.
        """
        method = getattr(owner, name, None)
        names = list(inspect.signature(method).parameters) if method is not None else []

        def hook(result: Any, *args: Any, **kwargs: Any) -> None:
            callback(dict(zip(names, args, strict=False)) | kwargs if args else kwargs)

        return hook if method is not None else None

    # Called on the engine core's thread, within its steps.

    def _before_schedule(self, *_: Any, **__: Any) -> None:
        self._is_in_step = False
        self._between_steps()
        self._is_in_step = True
        self._scheduled_ns = self.step_started_ns = time.monotonic_ns()

    def _after_schedule(self, output: Any, *_: Any, **__: Any) -> None:
        now_ns = time.monotonic_ns()
        self._schedule_ns, self._scheduled_ns = now_ns - self._scheduled_ns, now_ns
        self._events.append(("scheduled", output, now_ns))
        self._is_in_step = False

    def _before_update(self, step: Any, outcome: Any, *_: Any, **__: Any) -> None:
        self._is_in_step = True
        self._commit_started_ns = time.monotonic_ns()
        if (
            drafts := step.scheduled_spec_decode_tokens
        ):  # recorded here, because vLLM truncates the sampled tokens in place
            indices, sampled = outcome.req_id_to_index, outcome.sampled_token_ids
            draft_counts = [
                (request_id, len(drafts[request_id]), len(sampled[indices[request_id]]))
                for request_id in drafts
                if request_id in indices
            ]
            self._events.append(("guessed", draft_counts))

    def _after_update(self, result: Any, step: Any, *_: Any, **__: Any) -> None:
        self._is_in_step = False
        self._record(step)

    def _flush_between_steps(self) -> None:
        if not self._is_in_step:
            self.flush()

    def _added(self, result: Any, request: Any, *_: Any, **__: Any) -> None:
        if self.scheduler.requests.get(request.request_id) is request:
            self._events.append(("added", request))
            self._flush_between_steps()

    def _preempted(self, request: Any, *_: Any, **__: Any) -> None:
        num_free = self._pool.get_num_free_blocks()
        now_ns = time.monotonic_ns()
        self._events.append(("preempted", request, request.num_computed_tokens, num_free, self.asked_by, now_ns))

    def _finished(self, result: Any, request: Any, *_: Any, **__: Any) -> None:
        self._events.append(("finished", request, request.status, request.num_output_tokens))

    def _allocated(self, blocks: list[Any], *_: Any, **__: Any) -> None:
        self._touched += blocks
        self._events.append(("new", [block.block_id for block in blocks]))

    def _hit(self, result: Any, blocks: Any, *_: Any, **__: Any) -> None:
        if blocks:
            self._touched += blocks
            self._events.append(("hit", [block.block_id for block in blocks]))

    def _record_queued(self, end: str, blocks: list[Any]) -> None:
        """Record that blocks were queued for reuse at one `end` of the queue: "last" or "first"."""
        if blocks:
            self._events.append((end, [block.block_id for block in blocks]))

    def _load_started(self, result: Any, request: Any, blocks: Any, num_tokens: int, *_: Any, **__: Any) -> None:
        if num_tokens:
            self._events.append(("loads", request, blocks.get_block_ids(), num_tokens))

    def _before_evict(self, ids: Iterable[int], *_: Any, **__: Any) -> None:
        """Record explicit evictions. A block that loses its hash because it is allocated again needs no hook
        here, because `_allocated` records it.
        """
        blocks = [self._pool.blocks[block] for block in ids]
        self._touched += blocks
        self._events.append(("evicted", [block.block_id for block in blocks]))

    def _cached(self, arguments: dict[str, Any]) -> None:
        first, end = arguments["num_cached_blocks"], arguments["num_full_blocks"]
        if first < end:
            blocks = arguments["blocks"][first:end]
            self._touched += blocks
            ids = [block.block_id for block in blocks]
            self._events.append(
                ("cached", arguments["request"], arguments["kv_cache_group_id"], first, ids, arguments["block_size"])
            )

    def _reset(self, was_reset: bool, *_: Any, **__: Any) -> None:
        if was_reset:
            self._events.append(("reset",))
            self._flush_between_steps()

    def _record(self, step: Any) -> None:
        now_ns = time.monotonic_ns()
        scheduler = self.scheduler
        if second_blocks := self._touched_second:
            ids, refs = [block.block_id for block in second_blocks], [block.ref_cnt for block in second_blocks]
            self._events.append(("below", ids, refs, self._hash_of(second_blocks)))
            second_blocks.clear()
        events, self._events = self._events, []
        touched, self._touched = self._touched, []
        running = list(scheduler.running)
        _, num_waiting = scheduler.get_request_counts()
        self.records.append(
            VllmRecord(
                now_ns,
                events,
                step,
                running,
                [request.num_computed_tokens for request in running],
                [request.num_output_tokens for request in running],
                num_waiting,
                self._first_waiting(),
                [
                    (each.request_id, each.status.name, each.num_computed_tokens)
                    for each in islice(self._not_ready_requests(), MAX_NOT_READY)
                ],
                self._pool.get_num_free_blocks(),
                [block.block_id for block in touched],
                [block.ref_cnt for block in touched],
                self._hash_of(touched),
                self._state_tables(running) if self._state_groups else {},
                None if step is None else self._timings(now_ns),
            )
        )
        if step is not None:
            self.step_started_ns = 0
        self._recording_ns = time.monotonic_ns() - now_ns

    def _timings(self, now_ns: int) -> Timings:
        run_ns = self._commit_started_ns - self._scheduled_ns
        return Timings(self._schedule_ns, run_ns, 0, now_ns - self._commit_started_ns, self._recording_ns)

    def _first_waiting(self) -> Any:
        queue = self.scheduler.waiting
        return queue.peek_request() if queue else None

    def _not_ready_requests(self) -> Iterable[Any]:
        return getattr(self.scheduler, self._not_ready, None) or ()

    def _state_tables(self, running: list[Any]) -> dict[tuple[str, int], list[int]]:
        return {
            (request.request_id, group): [
                block.block_id for block in self._managers[group].req_to_blocks.get(request.request_id, ())
            ]
            for group in self._state_groups
            for request in running
        }


def _hash_reader(block: Any) -> Callable[[list[Any]], list[bytes | None]]:
    """Return a function that reads the hashes of blocks. It reads the private field if it exists, which is
    faster than the property.
    """
    if hasattr(block, "_block_hash"):
        return lambda blocks: [block._block_hash for block in blocks]
    return lambda blocks: [block.block_hash for block in blocks]

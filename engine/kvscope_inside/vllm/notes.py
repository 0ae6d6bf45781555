"""Notes what vLLM's scheduler and block pool do, on the engine core's own thread: a tuple for each thing that happened,
and at the end of each step how the blocks stand that were touched.

Owns the hooks and what is read of vLLM's objects. It never copies a whole table or pool, reads no device and waits for
nothing; all else is made of the notes by another thread (`replay`).
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvscope_inside.hooks import Hooks

Happened = tuple[Any, ...]
"""A word, and what it is about: ("added", request), ("scheduled", output), …"""


class Note(NamedTuple):
    """All between two notes, in order, and how things stand after it."""

    time_ns: int
    happened: list[Happened]
    step: Any
    """The SchedulerOutput that was executed; None: no step, something happened between two."""
    outcome: Any
    """The ModelRunnerOutput of it."""
    running: list[Any]
    computed: list[int]
    """Of each that runs, tokens whose KV is in blocks, or soon will be (async scheduling)."""
    num_outputs: list[int]
    num_waiting: int
    blocks: list[int]
    """Ids of those that were touched, the last row of each counts."""
    ref_counts: list[int]
    hashes: list[bytes | None]
    state_tables: dict[tuple[str, int], list[int]]
    """Block tables that are not append-only (recurrent states), whole: by request id and group."""
    schedule_ns: int
    run_ns: int
    commit_ns: int
    note_ns: int
    """What the note before cost."""


class StepNotes:
    """Hooks on one scheduler, from construction on. `notes` is for another thread to take from.

    `between_steps` is called on the engine core's thread before each step.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, between_steps: Callable[[], None]) -> None:
        self.notes: deque[Note] = deque()
        self.scheduler = scheduler
        self.asked_by = ""
        """Who asked for the preemptions that come, by name; empty: nobody."""
        self.step_started_ns = 0
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._between_steps = between_steps
        self._happened: list[Happened] = []
        self._touched: list[Any] = []
        self._letting_go: tuple[str, int] | None = None
        """Of whose table in which group a manager frees blocks now."""
        self._is_in_step = False
        self._scheduled_ns = self._schedule_ns = self._commits_ns = self._note_ns = 0
        self._state_groups: list[int] = []
        self._hash_of = _hash_reader(self._pool.blocks[0])
        self._put(hooks)

    def happen(self, *happened: Any) -> None:
        """Something that kvscope did to the engine between two steps."""
        self._happened.append(happened)

    def flush(self) -> None:
        """Note what happened between two steps."""
        if self._happened or self._touched:
            self._note(None, None)

    def _put(self, hooks: Hooks) -> None:
        scheduler, pool = self.scheduler, self._pool
        hooks.before(scheduler, "schedule", self._before_schedule)
        hooks.after(scheduler, "schedule", self._after_schedule)
        hooks.before(scheduler, "update_from_output", self._before_update)
        hooks.after(scheduler, "update_from_output", self._after_update)
        hooks.after(scheduler, "add_request", self._added)
        hooks.before(scheduler, "_preempt_request", self._preempted)
        hooks.after(scheduler, "_free_request", self._finished)
        hooks.after(scheduler, "finish_requests", lambda *_, **__: self._unless_in_step())
        hooks.after(pool, "get_new_blocks", self._got_new)
        hooks.after(pool, "touch", self._hit)
        hooks.before(pool, "evict_blocks", self._evicts)
        hooks.after(pool, "reset_prefix_cache", self._reset)
        self._put_around_free(hooks)
        cached = self._by_name(pool, "cache_full_blocks", self._cached)
        if cached is not None:
            hooks.after(pool, "cache_full_blocks", cached)
        for group, manager in enumerate(self._managers):
            name = type(manager.kv_cache_spec).__name__
            if "Mamba" in name:
                self._state_groups.append(group)
            elif not name.startswith(("FullAttention", "MLA")):
                self._put_around_skipping(hooks, manager, group)

    def _put_around_free(self, hooks: Hooks) -> None:
        """`free_blocks` is given an iterator, which can be read once."""
        original = getattr(self._pool, "free_blocks", None)
        if original is None:
            hooks.missing.append("free_blocks")
            return

        def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            if not hooks.are_on:
                return original(ordered_blocks, *args, **kwargs)
            blocks = list(ordered_blocks)
            result = original(blocks, *args, **kwargs)
            self._touched += blocks
            if self._letting_go is not None and blocks:
                self._happened.append(("let go", *self._letting_go, [block.block_id for block in blocks]))
            return result

        hooks.put(self._pool, "free_blocks", free_blocks)

    def _put_around_skipping(self, hooks: Hooks, manager: Any, group: int) -> None:
        """What a window has left behind is freed here, and its entry is the null block from then on."""
        original = manager.remove_skipped_blocks

        def remove_skipped_blocks(request_id: str, *args: Any, **kwargs: Any) -> Any:
            self._letting_go = request_id, group
            try:
                return original(request_id, *args, **kwargs)
            finally:
                self._letting_go = None

        hooks.put(manager, "remove_skipped_blocks", remove_skipped_blocks)

    @staticmethod
    def _by_name(owner: Any, name: str, note: Callable[[dict[str, Any]], None]) -> Callable[..., None] | None:
        """A hook that is given arguments by name, however they were passed."""
        method = getattr(owner, name, None)
        names = list(inspect.signature(method).parameters) if method is not None else []

        def hook(result: Any, *args: Any, **kwargs: Any) -> None:
            note(dict(zip(names, args, strict=False)) | kwargs if args else kwargs)

        return hook if method is not None else None

    # On the engine core's thread, within its steps.

    def _before_schedule(self, *_: Any, **__: Any) -> None:
        self._is_in_step = False
        self._between_steps()
        self._is_in_step = True
        self._scheduled_ns = self.step_started_ns = time.monotonic_ns()

    def _after_schedule(self, output: Any, *_: Any, **__: Any) -> None:
        now_ns = time.monotonic_ns()
        self._schedule_ns, self._scheduled_ns = now_ns - self._scheduled_ns, now_ns
        self._happened.append(("scheduled", output))
        self._is_in_step = False

    def _before_update(self, *_: Any, **__: Any) -> None:
        self._is_in_step = True
        self._commits_ns = time.monotonic_ns()

    def _after_update(self, result: Any, step: Any, outcome: Any, *_: Any, **__: Any) -> None:
        self._is_in_step = False
        self._note(step, outcome)

    def _unless_in_step(self) -> None:
        if not self._is_in_step:
            self.flush()

    def _added(self, result: Any, request: Any, *_: Any, **__: Any) -> None:
        if self.scheduler.requests.get(request.request_id) is request:
            self._happened.append(("added", request))
            self._unless_in_step()

    def _preempted(self, request: Any, *_: Any, **__: Any) -> None:
        num_free = self._pool.get_num_free_blocks()
        self._happened.append(("preempted", request, request.num_computed_tokens, num_free, self.asked_by))

    def _finished(self, result: Any, request: Any, *_: Any, **__: Any) -> None:
        self._happened.append(("finished", request, request.status, request.num_output_tokens))

    def _got_new(self, blocks: list[Any], *_: Any, **__: Any) -> None:
        self._touched += blocks
        self._happened.append(("new", [block.block_id for block in blocks]))

    def _hit(self, result: Any, blocks: Any, *_: Any, **__: Any) -> None:
        if blocks:
            self._touched += blocks
            self._happened.append(("hit", [block.block_id for block in blocks]))

    def _evicts(self, ids: Iterable[int], *_: Any, **__: Any) -> None:
        """Those that have a hash lose it; blocks that are given out do so, too, and need no hook."""
        blocks = [self._pool.blocks[block] for block in ids]
        self._touched += blocks
        self._happened.append(("evicted", [block.block_id for block in blocks]))

    def _cached(self, said: dict[str, Any]) -> None:
        first, end = said["num_cached_blocks"], said["num_full_blocks"]
        if first < end:
            blocks = said["blocks"][first:end]
            self._touched += blocks
            ids = [block.block_id for block in blocks]
            self._happened.append(
                ("cached", said["request"], said["kv_cache_group_id"], first, ids, said["block_size"])
            )

    def _reset(self, was_reset: bool, *_: Any, **__: Any) -> None:
        if was_reset:
            self._happened.append(("reset",))
            self._unless_in_step()

    def _note(self, step: Any, outcome: Any) -> None:
        now_ns = time.monotonic_ns()
        scheduler = self.scheduler
        happened, self._happened = self._happened, []
        touched, self._touched = self._touched, []
        running = list(scheduler.running)
        _, num_waiting = scheduler.get_request_counts()
        self.notes.append(
            Note(
                now_ns,
                happened,
                step,
                outcome,
                running,
                [request.num_computed_tokens for request in running],
                [request.num_output_tokens for request in running],
                num_waiting,
                [block.block_id for block in touched],
                [block.ref_cnt for block in touched],
                self._hash_of(touched),
                self._tables_of_states(running) if self._state_groups else {},
                self._schedule_ns,
                self._commits_ns - self._scheduled_ns if step is not None else 0,
                now_ns - self._commits_ns if step is not None else 0,
                self._note_ns,
            )
        )
        if step is not None:
            self.step_started_ns = 0
        self._note_ns = time.monotonic_ns() - now_ns

    def _tables_of_states(self, running: list[Any]) -> dict[tuple[str, int], list[int]]:
        return {
            (request.request_id, group): [
                block.block_id for block in self._managers[group].req_to_blocks.get(request.request_id, ())
            ]
            for group in self._state_groups
            for request in running
        }


def _hash_reader(block: Any) -> Callable[[list[Any]], list[bytes | None]]:
    """How the hashes of many blocks are read: the field is read faster than the property, where it is there."""
    if hasattr(block, "_block_hash"):
        return lambda blocks: [block._block_hash for block in blocks]
    return lambda blocks: [block.block_hash for block in blocks]

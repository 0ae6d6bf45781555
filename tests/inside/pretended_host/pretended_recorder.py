"""Hooks on the pretended engine: the events of a step in order, and the touched blocks after it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_telemetry.messages.telemetry import Timings


class PretendedRecord(NamedTuple):
    """One step."""

    time_ns: int
    events: list[tuple[Any, ...]]
    ran: dict[str, int]
    running: list[tuple[str, int, int]]
    """Name, computed tokens and tokens of the answer."""
    num_waiting: int
    blocks: list[tuple[int, int, bytes]]
    """Index, users and digest of each block that was touched."""
    timings: Timings | None


class PretendedRecorder:
    def __init__(self, engine: Any, hooks: Hooks) -> None:
        self.records: deque[PretendedRecord] = deque()
        self.step_started_ns = 0
        self._engine = engine
        self._events: list[tuple[Any, ...]] = []
        self._touched: set[int] = set()
        hooks.after(engine, "submit", lambda _, job: self._events.append(("submitted", job)))
        hooks.after(engine, "find", self._found)
        hooks.after(engine, "start", lambda _, job, found: self._events.append(("started", job, len(found))))
        hooks.around(engine, "allocate", lambda job, count: len(job.blocks), self._allocated)
        hooks.before(engine, "evict", lambda block, job: self._events.append(("evicted", block.index, job)))
        hooks.after(engine, "cache", self._cached)
        hooks.before(engine, "preempt", self._preempted)
        hooks.before(engine, "end", self._ended)
        hooks.around(engine, "step", self._begin, self._record)

    def _found(self, found: list[Any], job: Any) -> None:
        self._touched.update(block.index for block in found)
        self._events.append(("found", job, [block.index for block in found]))

    def _allocated(self, start: int, given: list[Any], job: Any, count: int) -> None:
        self._touched.update(block.index for block in given)
        self._events.append(("allocated", job, start, [block.index for block in given]))

    def _cached(self, is_new: bool, job: Any, index: int) -> None:
        if is_new:
            self._touched.add(job.blocks[index].index)
            digests = [job.digest(each) for each in range(max(0, index - 1), index + 1)]
            self._events.append(("cached", job, index, job.blocks[index].index, digests))

    def _preempted(self, job: Any, needy: Any) -> None:
        self._touched.update(block.index for block in job.blocks)
        self._events.append(("preempted", job, needy, job.num_done, len(self._engine.unused)))

    def _ended(self, job: Any, reason: str) -> None:
        self._touched.update(block.index for block in job.blocks)
        self._events.append(("ended", job, reason, job.num_done, len(job.answer)))

    def _begin(self) -> int:
        self.step_started_ns = time.monotonic_ns()
        return self.step_started_ns

    def _record(self, started_ns: int, ran: dict[str, int]) -> None:
        now_ns = time.monotonic_ns()
        pool, events, touched = self._engine.pool, self._events, sorted(self._touched)
        self._events, self._touched, self.step_started_ns = [], set(), 0
        self.records.append(
            PretendedRecord(
                now_ns,
                events,
                ran,
                [(job.name, job.num_done, len(job.answer)) for job in self._engine.running],
                len(self._engine.waiting),
                [(index, pool[index].num_users, pool[index].digest) for index in touched],
                Timings(0, now_ns - started_ns, 0, 0, 0),
            )
        )

"""Polls the GPU's memory between steps, and limits steps while other programs hold memory that the engine has planned
to use.

Decides when to poll and what to release or restore; `memory_watch` decides how far steps are limited. The block pool is
never resized. A poll queries two values from the driver and waits for no kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvscope_engine.model.device_memory.device_memory import DeviceMemory
from kvscope_engine.model.device_memory.gpu_holders import describe_holders, grown
from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_engine.model.device_memory.memory_watch import MemoryLevel, MemoryWatch, StepCosts
from kvscope_engine.model.device_memory.paging import PagingWatch
from kvscope_engine.policy.step_plan import StepPlan, StepResult

POLL_INTERVAL_S: Final = 2.0
SLACK_BYTES: Final = 128 << 20
"""Growth of other programs' memory since the start, in bytes, that is always tolerated. Part of it may be kernels that
this engine's driver loads late.
"""
LOW_FREE_BYTES: Final = 256 << 20
"""Free bytes of GPU memory below which allocations by other programs may fail."""
MIN_UNUSED_BYTES: Final = 512 << 20
"""Minimum unused bytes in torch's allocator for which waiting for the step in flight and releasing them is worthwhile.
"""
RELEASE_INTERVAL_S: Final = 30.0
"""Minimum seconds between two releases of torch's unused memory, because the next large step allocates it again."""


class StepLimiter(Protocol):
    """Interface of `policy.scheduling.scheduler.Scheduler` that the guard needs."""

    def cap_tokens(self, max_tokens: int | None) -> None:
        """Limit the tokens per step; None removes the limit."""


class GraphOwner(Protocol):
    """Interface of `model.runner.model_runner.ModelRunner` that the guard needs."""

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        """Free the CUDA graphs of decode-only steps unless `of_decodes` is true, and those of steps with prefills
        unless `of_prefills` is true.
        """


def _run_in_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="kvscope-holders", daemon=True).start()


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    planned_bytes: int
    """Bytes that the engine may allocate in total. 0 if there is no plan; steps are not limited then."""
    costs: StepCosts
    other_bytes: int | None = None
    """Bytes that other programs held when the plan was made; None for the bytes that they hold when the guard is
    created.
    """


class MemoryGuard:
    """Limits steps while other programs hold too much of the GPU's memory. Created after the engine's last allocation.

    Args:
        memory: The GPU's memory.
        budget: Memory that was planned for the engine.
        steps: Limits the tokens per step.
        graphs: Frees CUDA graphs.
        add_note: Called with one line about each change, on any thread.
        pages: Returns the bytes that the engine allocated outside torch.
        promise: Called with the bytes that are planned and not allocated yet.
        paging: Detects memory that the driver paged out; None where drivers do not page.
        run_in_background: Runs work that may wait for the driver; default: a new thread.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        budget: MemoryBudget,
        steps: StepLimiter,
        graphs: GraphOwner,
        add_note: Callable[[str], object],
        *,
        pages: Callable[[], int] = lambda: 0,
        promise: Callable[[int], object] = lambda num_bytes: None,
        paging: PagingWatch | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        run_in_background: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self._memory = memory
        self._steps = steps
        self._graphs = graphs
        self._add_note = add_note
        self._pages = pages
        self._promise = promise
        self._clock_s = clock_s
        self._run_in_background = run_in_background or _run_in_thread
        self._paging = paging
        self._planned = budget.planned_bytes
        costs = budget.costs
        self._total = memory.total_bytes
        self._full_level = costs.levels[0]
        self._graph_nodes = 0
        self._next_release_s = 0.0
        free, own_bytes = self._free_and_own_bytes()
        current_others = self._total - free - own_bytes
        others = current_others if budget.other_bytes is None else budget.other_bytes
        self._watch = MemoryWatch(costs, max(others + SLACK_BYTES, self._total - self._planned))
        self._graph_nodes = min(costs.graphs + costs.piecewise_graphs, max(0, current_others - others))
        own_bytes += self._graph_nodes
        self._initial_holders = {holder.pid: holder.num_bytes or 0 for holder in memory.holders.others()}
        self._promise(max(0, self._planned - own_bytes))
        self._next_poll_s = clock_s() + POLL_INTERVAL_S

    def poll(self, finish_in_flight: Callable[[], object]) -> None:
        """Poll before a step, at most every `POLL_INTERVAL_S`. `finish_in_flight` completes the step in flight."""
        now_s = self._clock_s()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_INTERVAL_S
        free, own_bytes = self._free_and_own_bytes()
        self._promise(max(0, self._planned - own_bytes))
        if self._paging is not None and (note := self._paging.check(self._total, free, own_bytes, now_s)):
            self._add_note(note)
        before, was_lowered, others = self._watch.level, self._watch.is_lowered, max(0, self._total - free - own_bytes)
        if not self._watch.update(others, now_s):
            if free < LOW_FREE_BYTES and now_s >= self._next_release_s:
                self._release_unused(free, now_s, finish_in_flight)
            return
        level = self._watch.level
        if level[1:] != before[1:] or not was_lowered:
            finish_in_flight()
        if not was_lowered:
            self._memory.empty_cache()
        self._steps.cap_tokens(level.max_tokens if level != self._full_level else None)
        if level[1:] != before[1:]:
            self._graphs.keep_graphs(of_decodes=level.has_graphs, of_prefills=level.has_piecewise_graphs)
        if not self._watch.is_lowered:
            self._add_note(f"the GPU's memory is free again: {self._level_text(level)}, as planned")
            return
        is_down, missing = level < before, self._watch.missing(others)
        self._run_in_background(lambda: self._add_note(self._change_text(level, missing, is_down=is_down)))

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Record the duration of a completed step, which may reveal paging."""
        if self._paging is not None:
            is_replayed = bool(result.graph_size or result.graph_tokens)
            context = sum(item.start for item in plan.scheduled)
            sizes = (number.bit_length() for number in (plan.num_tokens, len(plan.scheduled), context))
            shape = *sizes, is_replayed
            self._paging.record_step(shape, result.forward_ns)

    @property
    def is_lowered(self) -> bool:
        """Whether steps are limited to less than planned."""
        return self._watch.is_lowered

    def grown_holders_text(self) -> str:
        """Describe the processes that hold more GPU memory than at the engine's start; empty if the driver does not
        report them. May wait for the driver.
        """
        return describe_holders(grown(self._memory.holders.others(), self._initial_holders))

    def _release_unused(self, free: int, now_s: float, finish_in_flight: Callable[[], object]) -> None:
        """Release the unused memory of torch's allocator if it is at least `MIN_UNUSED_BYTES`. If little of it
        became free, for example because CUDA graphs hold it, the interval until the next release is longer.
        """
        if self._memory.reserved_bytes() - self._memory.held_bytes() < MIN_UNUSED_BYTES:
            return
        finish_in_flight()
        self._memory.empty_cache()
        was_of_use = self._memory.free_bytes() - free >= MIN_UNUSED_BYTES // 2
        self._next_release_s = now_s + (RELEASE_INTERVAL_S if was_of_use else 10 * RELEASE_INTERVAL_S)

    def _free_and_own_bytes(self) -> tuple[int, int]:
        """Return the GPU's free bytes and the bytes of this process: torch's, mapped pages, and the planned part of the
        driver's memory for CUDA graphs.
        """
        own_bytes = self._memory.reserved_bytes() + max(0, self._pages()) + self._graph_nodes
        return self._memory.free_bytes(), own_bytes

    def _change_text(self, level: MemoryLevel, missing: int, *, is_down: bool) -> str:
        if not is_down:
            return f"a part of the GPU's memory is free again: {self._level_text(level)}, until all of it is"
        processes = self.grown_holders_text()
        holders = (
            f"other programs now hold (more than at the start: {processes})"
            if processes
            else "other programs or the driver hold"
        )
        return (
            f"steps may need {gib(missing)} of the GPU's memory that {holders}:"
            f" {self._level_text(level)} until it is free again"
        )

    def _level_text(self, level: MemoryLevel) -> str:
        planned = "" if level.max_tokens == self._full_level.max_tokens else f" and not {self._full_level.max_tokens}"
        graphs = "" if level.has_piecewise_graphs else ", steps with prefills without CUDA graphs"
        graphs = graphs if level.has_graphs else ", all steps without CUDA graphs"
        return f"steps compute up to {level.max_tokens} tokens{planned}{graphs}"

"""Polls the GPU's memory between steps and limits steps while other programs hold memory that was planned for them.

Owns the polling, what is released and restored, and the notes about it. `memory_watch` decides how much; the block pool
is never resized. A poll queries two numbers from the driver and waits for no kernel.
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
from kvscope_engine.model.device_memory.memory_watch import Level, MemoryWatch, StepCosts
from kvscope_engine.model.device_memory.paging import PagingWatch
from kvscope_engine.policy.step_plan import StepPlan, StepResult

POLL_S: Final = 2.0
"""Minimum seconds between two polls."""
SLACK_BYTES: Final = 128 << 20
"""Growth of other memory since the start that is always tolerated: the engine's own driver also loads some kernels
late.
"""
LOW_BYTES: Final = 256 << 20
"""Free memory below which allocations of other programs may fail."""
UNUSED_BYTES: Final = 512 << 20
"""Unused memory in torch's allocator that is worth waiting for steps in flight to release."""
RELEASE_S: Final = 30.0
"""Minimum seconds between two such releases, since the next large step allocates the memory again."""


class CappedSteps(Protocol):
    """The part of `policy.scheduling.scheduler.Scheduler` that the guard needs."""

    def cap_tokens(self, max_tokens: int | None) -> None:
        """Limit the tokens per step; None removes the limit."""


class KeptGraphs(Protocol):
    """The part of `model.runner.model_runner.ModelRunner` that the guard needs."""

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        """Free the CUDA graphs of the kinds of steps that are False."""


def _in_a_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="kvscope-holders", daemon=True).start()


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory that was planned for an engine on a GPU."""

    planned_bytes: int
    """Bytes that the engine may allocate in total; 0 without a plan, which leaves steps unlimited."""
    costs: StepCosts
    """Memory that steps of each size need."""
    other_bytes: int | None = None
    """Bytes that other programs held when this was planned; None: what they hold now."""


class MemoryGuard:
    """Limits steps while other programs hold too much of the GPU's memory. Created once the engine has allocated
    everything.

    Args:
        memory: The GPU's memory.
        budget: Memory that was planned for the engine.
        steps: Limits the tokens per step.
        graphs: Frees CUDA graphs.
        add_note: Called with one line about each change, on any thread.
        pages: Returns the bytes that the engine allocated outside torch.
        promise: Called with the bytes that are planned and not allocated yet.
        paging: Detects memory paged out by the driver; None where drivers do not page.
        run_in_background: Runs work that may wait for the driver; default: a new thread.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        budget: MemoryBudget,
        steps: CappedSteps,
        graphs: KeptGraphs,
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
        self._run_in_background = run_in_background or _in_a_thread
        self._paging = paging
        self._planned = budget.planned_bytes
        costs = budget.costs
        self._total = memory.total_bytes
        self._top = costs.levels[0]
        self._graph_nodes = 0
        self._release_s = 0.0
        free, ours = self._free_and_own_bytes()
        now = self._total - free - ours
        others = now if budget.other_bytes is None else budget.other_bytes
        self._watch = MemoryWatch(costs, max(others + SLACK_BYTES, self._total - self._planned))
        self._graph_nodes = min(costs.graphs + costs.piecewise_graphs, max(0, now - others))
        ours += self._graph_nodes
        self._before = {h.pid: h.num_bytes or 0 for h in memory.holders.others()}
        self._promise(max(0, self._planned - ours))
        self._next_s = clock_s() + POLL_S

    def poll(self, finish_in_flight: Callable[[], object]) -> None:
        """Poll before a step, at most every `POLL_S`. `finish_in_flight` completes the step in flight."""
        now_s = self._clock_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + POLL_S
        free, ours = self._free_and_own_bytes()
        self._promise(max(0, self._planned - ours))
        if self._paging is not None and (words := self._paging.check(self._total, free, ours, now_s)):
            self._add_note(words)
        before, was_lowered, others = self._watch.level, self._watch.is_lowered, max(0, self._total - free - ours)
        if not self._watch.update(others, now_s):
            if free < LOW_BYTES and now_s >= self._release_s:
                self._release_unused(free, now_s, finish_in_flight)
            return
        level = self._watch.level
        if level[1:] != before[1:] or not was_lowered:
            finish_in_flight()
        if not was_lowered:
            self._memory.empty_cache()
        self._steps.cap_tokens(level.max_tokens if level != self._top else None)
        if level[1:] != before[1:]:
            self._graphs.keep_graphs(of_decodes=level.has_graphs, of_prefills=level.has_piecewise_graphs)
        if not self._watch.is_lowered:
            self._add_note(f"the GPU's memory is free again: {self._level_text(level)}, as planned")
            return
        is_down, missing = level < before, self._watch.missing(others)
        self._run_in_background(lambda: self._add_note(self._change(level, missing, is_down=is_down)))

    def ran(self, plan: StepPlan, result: StepResult) -> None:
        """Report a completed step, whose time may reveal paging."""
        if self._paging is not None:
            is_replayed = bool(result.graph_size or result.graph_tokens)
            context = sum(one.start for one in plan.scheduled)
            sizes = (number.bit_length() for number in (plan.num_tokens, len(plan.scheduled), context))
            shape = *sizes, is_replayed
            self._paging.record_step(shape, result.forward_ns)

    @property
    def is_lowered(self) -> bool:
        """Whether steps are limited to less than planned."""
        return self._watch.is_lowered

    def takers(self) -> str:
        """Describe processes that hold more GPU memory than at the engine's start; empty if the driver does not report
        them.

        May wait for the driver.
        """
        return describe_holders(grown(self._memory.holders.others(), self._before))

    def _release_unused(self, free: int, now_s: float, finish_in_flight: Callable[[], object]) -> None:
        """Release torch's unused memory if it is large. If that freed little (CUDA graphs may hold it), wait longer
        before the next time.
        """
        if self._memory.reserved_bytes() - self._memory.held_bytes() < UNUSED_BYTES:
            return
        finish_in_flight()
        self._memory.empty_cache()
        was_of_use = self._memory.free_bytes() - free >= UNUSED_BYTES // 2
        self._release_s = now_s + (RELEASE_S if was_of_use else 10 * RELEASE_S)

    def _free_and_own_bytes(self) -> tuple[int, int]:
        """Return the GPU's free bytes and the bytes that this process uses.

        The latter are torch's, those of mapped pages, and the planned part of the driver's memory for CUDA graphs.
        """
        ours = self._memory.reserved_bytes() + max(0, self._pages()) + self._graph_nodes
        return self._memory.free_bytes(), ours

    def _change(self, level: Level, missing: int, *, is_down: bool) -> str:
        """Describe a change of the level. May wait for the driver to name the other processes."""
        if not is_down:
            return f"a part of the GPU's memory is free again: {self._level_text(level)}, until all of it is"
        who = self.takers()
        whom = (
            f"other programs now hold (more than at the start: {who})" if who else "other programs or the driver hold"
        )
        return (
            f"steps may need {gib(missing)} of the GPU's memory that {whom}:"
            f" {self._level_text(level)} until it is free again"
        )

    def _level_text(self, level: Level) -> str:
        full = "" if level.max_tokens == self._top.max_tokens else f" and not {self._top.max_tokens}"
        lost = "" if level.has_piecewise_graphs else ", steps with prefills without CUDA graphs"
        lost = lost if level.has_graphs else ", all steps without CUDA graphs"
        return f"steps compute up to {level.max_tokens} tokens{full}{lost}"

"""Looks between steps at who has the GPU's memory, and has steps take less while others have what was planned for them.

Owns when it looks, what is given up and given back, and the notes about it. How much is decided by `memory_watch`; the
pool of blocks is never touched. A look asks the driver for two numbers and waits for no kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvscope_engine.model.device_memory.device_memory import DeviceMemory
from kvscope_engine.model.device_memory.gpu_holders import grown, holders_words
from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_engine.model.device_memory.memory_watch import Level, MemoryWatch, StepCosts
from kvscope_engine.model.device_memory.paging import PagingWatch
from kvscope_engine.policy.plan import StepPlan, StepResult

LOOK_S: Final = 2.0
"""Between two looks, and as long as an engine that stands still does not look."""
SLACK_BYTES: Final = 128 << 20
"""What others may take in any case since the engine began: its own driver, too, loads some kernels late."""
LOW_BYTES: Final = 256 << 20
"""With less free, other programs may fail for want of memory."""
UNUSED_BYTES: Final = 512 << 20
"""That torch keeps and no tensor has: so much is worth waiting for steps in flight."""
RELEASE_S: Final = 30.0
"""Between two times that it is given back, since the next large step takes it again."""


class CappedSteps(Protocol):
    """As `policy.scheduling.scheduler.Scheduler`."""

    def cap_tokens(self, max_tokens: int | None) -> None:
        """Steps compute no more than these."""


class KeptGraphs(Protocol):
    """What captured the CUDA graphs and can give some of them back: `model.runner.model_runner.ModelRunner`."""

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        """Keep CUDA graphs of these steps alone."""


def _in_a_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="kvscope-holders", daemon=True).start()


class MemoryGuard:
    """Made when the engine has all that it keeps. `planned` are bytes that it may take in all, 0 where nobody planned:
    then steps are left as they are. `others` had those bytes when that was planned; None: what they have now counts.
    `pages` are bytes that it has beside torch's; `note` takes lines on any thread; `promise` is told what is planned
    and not taken yet; `paging` is None where no driver pages; `beside` does what may wait for the driver."""

    def __init__(
        self,
        memory: DeviceMemory,
        planned: int,
        costs: StepCosts,
        steps: CappedSteps,
        graphs: KeptGraphs,
        note: Callable[[str], object],
        *,
        others: int | None = None,
        pages: Callable[[], int] = lambda: 0,
        promise: Callable[[int], object] = lambda num_bytes: None,
        paging: PagingWatch | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        beside: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self._memory, self._steps, self._graphs, self._note = memory, steps, graphs, note
        self._pages, self._promise, self._clock_s, self._beside = pages, promise, clock_s, beside or _in_a_thread
        self._paging = paging
        self._planned = planned
        self._total = memory.total_bytes
        self._top = costs.levels[0]
        self._graph_nodes = 0
        self._release_s = 0.0
        free, ours = self._read()
        now = self._total - free - ours
        others = now if others is None else others
        self._watch = MemoryWatch(costs, max(others + SLACK_BYTES, self._total - self._planned))
        self._graph_nodes = min(costs.graphs + costs.piecewise_graphs, max(0, now - others))
        ours += self._graph_nodes
        self._before = {h.pid: h.num_bytes or 0 for h in memory.holders.others()}
        self._promise(max(0, self._planned - ours))
        self._next_s = clock_s() + LOOK_S

    def look(self, settle: Callable[[], object]) -> None:
        """Before a step, at most every `LOOK_S`. After `settle` none is in flight."""
        now_s = self._clock_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        free, ours = self._read()
        self._promise(max(0, self._planned - ours))
        if self._paging is not None and (words := self._paging.look(self._total, free, ours, now_s)):
            self._note(words)
        before, was_lowered, others = self._watch.level, self._watch.is_lowered, max(0, self._total - free - ours)
        if not self._watch.look(others, now_s):
            if free < LOW_BYTES and now_s >= self._release_s:
                self._give_back(free, now_s, settle)
            return
        level = self._watch.level
        if level[1:] != before[1:] or not was_lowered:
            settle()
        if not was_lowered:
            self._memory.release_unused()
        self._steps.cap_tokens(level.max_tokens if level != self._top else None)
        if level[1:] != before[1:]:
            self._graphs.keep_graphs(of_decodes=level.has_graphs, of_prefills=level.has_piecewise_graphs)
        if not self._watch.is_lowered:
            self._note(f"the GPU's memory is free again: {self._words(level)}, as planned")
            return
        is_down, missing = level < before, self._watch.missing(others)
        self._beside(lambda: self._note(self._change(level, missing, is_down=is_down)))

    def ran(self, plan: StepPlan, result: StepResult) -> None:
        """A step came back."""
        if self._paging is not None:
            is_replayed = bool(result.graph_size or result.graph_tokens)
            context = sum(one.start for one in plan.scheduled)
            sizes = (number.bit_length() for number in (plan.num_tokens, len(plan.scheduled), context))
            shape = *sizes, is_replayed
            self._paging.ran(shape, result.forward_ns)

    @property
    def is_lowered(self) -> bool:
        """Whether steps may take less than was planned."""
        return self._watch.is_lowered

    def takers(self) -> str:
        """Who has more memory of the GPU than when the engine began; empty where the driver does not tell. May wait for
        it."""
        return holders_words(grown(self._memory.holders.others(), self._before))

    def _give_back(self, free: int, now_s: float, settle: Callable[[], object]) -> None:
        """What torch keeps unused, where that is much. What graphs keep cannot be given back: then it is long until the
        next time."""
        if self._memory.reserved_bytes() - self._memory.held_bytes() < UNUSED_BYTES:
            return
        settle()
        self._memory.release_unused()
        was_of_use = self._memory.free_bytes() - free >= UNUSED_BYTES // 2
        self._release_s = now_s + (RELEASE_S if was_of_use else 10 * RELEASE_S)

    def _read(self) -> tuple[int, int]:
        """Bytes of the GPU that nobody has, and those of this process: torch's, pages, and what the driver took for
        graphs, as far as it was planned."""
        ours = self._memory.reserved_bytes() + max(0, self._pages()) + self._graph_nodes
        return self._memory.free_bytes(), ours

    def _change(self, level: Level, missing: int, *, is_down: bool) -> str:
        """May wait for the driver, to say who it was."""
        if not is_down:
            return f"a part of the GPU's memory is free again: {self._words(level)}, until all of it is"
        who = self.takers()
        whom = (
            f"other programs now hold (more than at the start: {who})" if who else "other programs or the driver hold"
        )
        return (
            f"steps may need {gib(missing)} of the GPU's memory that {whom}:"
            f" {self._words(level)} until it is free again"
        )

    def _words(self, level: Level) -> str:
        full = "" if level.max_tokens == self._top.max_tokens else f" and not {self._top.max_tokens}"
        lost = "" if level.has_piecewise_graphs else ", steps with prefills without CUDA graphs"
        lost = lost if level.has_graphs else ", all steps without CUDA graphs"
        return f"steps compute up to {level.max_tokens} tokens{full}{lost}"

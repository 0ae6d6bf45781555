"""Tests of the memory guard: which limits it lowers while other programs take GPU memory, in which order, and that it
restores all of them.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.memory_guard import POLL_INTERVAL_S, RELEASE_INTERVAL_S, MemoryBudget, MemoryGuard
from kvscope_engine.model.device_memory.gpu_holders import GpuHolders
from kvscope_engine.model.device_memory.memory_watch import RAISE_AFTER_S, StepCosts
from kvscope_engine.model.device_memory.paging import PagingWatch
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult
from kvscope_telemetry.messages.devices import Gpu, GpuProcess

GIB = 1 << 30
COSTS = StepCosts(
    max_tokens=2048, min_tokens=512, activations=2 * GIB, fixed=0, graphs=GIB // 2, piecewise_graphs=GIB // 4
)
PLANNED = 20 * GIB
NAME = "no-such-program"
PID = 1 << 22
"""A process id greater than any on Linux."""


class FakeDriver:
    """A GPU of 24 GiB with 18 GiB of this process; it draws a window and computes for other processes."""

    total_bytes = 24 * GIB
    num_multiprocessors, compute_capability = 132, 90

    def __init__(self) -> None:
        self.ours = 18 * GIB
        self.others = GIB
        self.unused = 0
        self.done: list[Any] = []
        self.holders = GpuHolders("GPU-1", self)

    def sample(self) -> tuple[Gpu, ...]:
        processes = (
            GpuProcess(pid=os.getpid(), used_bytes=self.ours),
            GpuProcess(pid=PID, name=NAME, used_bytes=self.others),
        )
        return (Gpu(index=0, uuid="GPU-1", processes=processes),)

    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.ours - self.others)

    def held_bytes(self) -> int:
        return self.ours - self.unused

    def reserved_bytes(self) -> int:
        return self.ours

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None:
        self.done.append("unused")
        self.ours, self.unused = self.ours - self.unused, 0

    def promised_bytes(self) -> int:
        return 0

    def draws_display(self) -> bool:
        return True

    def cap_tokens(self, max_tokens: int | None) -> None:
        self.done.append(("cap", max_tokens))

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        self.done.append(("graphs", of_decodes, of_prefills))

    def finish_in_flight(self) -> None:
        self.done.append("settled")


class GuardSetting:
    """A guard, its driver and the time."""

    def __init__(self, others: int = GIB, planned_others: int | None = None, **options: Any) -> None:
        self.now_s = 0.0
        self.driver = FakeDriver()
        self.driver.others = others
        self.notes: list[str] = []
        self.promised: list[int] = []
        self.guard = MemoryGuard(
            self.driver,
            MemoryBudget(PLANNED, COSTS, planned_others),
            self.driver,
            self.driver,
            self.notes.append,
            promise=self.promised.append,
            clock_s=lambda: self.now_s,
            run_in_background=lambda work: work(),
            **options,
        )

    def poll_with_others(self, others_gib: float, after_s: float = POLL_INTERVAL_S) -> list[Any]:
        """Poll while other programs hold `others_gib`. Returns what the guard did."""
        self.driver.others, self.now_s = int(others_gib * GIB), self.now_s + after_s
        self.driver.done.clear()
        self.guard.poll(self.driver.finish_in_flight)
        return list(self.driver.done)


@pytest.fixture
def setting() -> GuardSetting:
    return GuardSetting()


def test_other_programs_within_the_memory_reserve_do_not_lower_step_limits(setting: GuardSetting) -> None:
    assert setting.poll_with_others(4.0) == []
    assert setting.notes == []


def test_memory_taken_by_others_shrinks_steps_then_frees_graphs_until_it_is_free_again(setting: GuardSetting) -> None:
    """Each action is reported once with the program that took the memory; the pool of blocks is not touched here."""
    assert setting.poll_with_others(5.0) == ["settled", "unused", ("cap", 1024)]
    assert setting.notes.pop() == (
        "steps may need 1.0 GiB of the GPU's memory that other programs now hold"
        f" (more than at the start: {NAME} 4.0 GiB (pid {PID})):"
        " steps compute up to 1024 tokens and not 2048 until it is free again"
    )
    assert setting.poll_with_others(5.0) == []
    assert setting.guard.is_lowered
    assert setting.poll_with_others(5.4) == [("cap", 512)], "nothing is given back twice"
    assert setting.poll_with_others(5.7) == ["settled", ("cap", 512), ("graphs", True, False)]
    assert "up to 512 tokens and not 2048, steps with prefills without CUDA graphs until" in setting.notes[-1]
    assert setting.poll_with_others(6.0) == ["settled", ("cap", 512), ("graphs", False, False)]
    assert "all steps without CUDA graphs" in setting.notes[-1]
    assert setting.poll_with_others(6.0, 600) == []
    assert len(setting.notes) == 3
    assert setting.poll_with_others(4.9) == []
    assert setting.poll_with_others(4.9, RAISE_AFTER_S) == ["settled", ("cap", 1024), ("graphs", True, True)]
    assert setting.notes[-1] == (
        "a part of the GPU's memory is free again: steps compute up to 1024 tokens and not 2048, until all of it is"
    )
    assert setting.poll_with_others(1.0) == []
    assert setting.poll_with_others(1.0, RAISE_AFTER_S) == [("cap", None)]
    assert setting.notes[-1] == "the GPU's memory is free again: steps compute up to 2048 tokens, as planned"
    assert not setting.guard.is_lowered


def test_memory_is_checked_at_intervals(setting: GuardSetting) -> None:
    assert setting.poll_with_others(5.0, POLL_INTERVAL_S / 2) == []
    assert setting.poll_with_others(5.0, POLL_INTERVAL_S / 2) != []


def test_memory_that_others_use_beyond_the_plan_at_start_does_not_lower_step_limits() -> None:
    """A driver that has a little more for this process than planned, and a little more later, does not shrink steps."""
    setting = GuardSetting(others=5 * GIB)
    assert setting.poll_with_others(5.1) == []
    assert setting.poll_with_others(5.2) == ["settled", "unused", ("cap", 1024)]


def test_memory_taken_by_others_after_planning_lowers_step_limits() -> None:
    setting = GuardSetting(others=6 * GIB, planned_others=GIB)
    assert setting.poll_with_others(6.0) != []


def test_driver_memory_of_graphs_counts_as_own() -> None:
    """Torch does not count it: it is neither promised again nor taken for another program."""
    setting = GuardSetting(others=GIB + GIB // 2, planned_others=GIB)
    assert setting.promised == [2 * GIB - GIB // 2]
    assert setting.poll_with_others(4.5) == []


def test_full_gpu_gets_back_unused_torch_memory() -> None:
    """Steps have enough, but other programs find no memory, so unused memory is released at intervals."""
    setting = GuardSetting()
    for after_s, done in (
        (POLL_INTERVAL_S, ["settled", "unused"]),
        (POLL_INTERVAL_S, []),
        (RELEASE_INTERVAL_S, ["settled", "unused"]),
    ):
        setting.driver.ours, setting.driver.unused = 20 * GIB, GIB
        assert setting.poll_with_others(4.0, after_s) == done
    setting.driver.ours, setting.driver.unused = 20 * GIB, GIB // 4
    assert setting.poll_with_others(4.0, 600) == [], "too little memory to release was released"
    assert setting.notes == []


def test_memory_announced_to_other_engines_shrinks_as_it_is_allocated(setting: GuardSetting) -> None:
    setting.driver.ours = 19 * GIB
    setting.poll_with_others(1.0)
    setting.driver.ours = 21 * GIB
    setting.poll_with_others(1.0)
    assert setting.promised == [2 * GIB, GIB, 0]


def test_pages_outside_torch_count_as_own() -> None:
    setting = GuardSetting(pages=lambda: GIB)
    assert setting.poll_with_others(5.0) == [], "own pages were counted as those of others"


def test_notice_without_known_holders_names_other_programs_or_the_driver(setting: GuardSetting) -> None:
    setting.driver.holders = GpuHolders("GPU-1", SimpleNamespace(sample=lambda: (Gpu(index=0, uuid="GPU-1"),)))
    setting.poll_with_others(5.0)
    assert "that other programs or the driver hold: steps compute" in setting.notes[0]


def make_step(forward_ns: int, graph_size: int = 1) -> tuple[StepPlan, StepResult]:
    return StepPlan((), 0), StepResult((), forward_ns=forward_ns, graph_size=graph_size)


def test_paging_to_host_memory_is_reported_with_advice() -> None:
    setting = GuardSetting(paging=PagingWatch())
    for _ in range(20):
        setting.guard.record_step(*make_step(1_000_000))
    setting.poll_with_others(5.9)
    setting.notes.clear()
    for _ in range(20):
        setting.guard.record_step(*make_step(9_000_000, graph_size=0))
    setting.poll_with_others(5.9)
    assert setting.notes == [], "a step without its graph is another one"
    for _ in range(20):
        setting.guard.record_step(*make_step(9_000_000))
    setting.poll_with_others(5.9)
    (note,) = setting.notes
    assert "steps take 9 times as long as before" in note
    assert "CUDA - Sysmem Fallback Policy" in note


def test_longer_context_is_not_mistaken_for_paging() -> None:
    setting = GuardSetting(paging=PagingWatch())
    for start, forward_ns in ((10, 1_000_000), (100_000, 9_000_000)):
        request: Any = SimpleNamespace()
        scheduled = (Scheduled(request, start, 1, samples=True),)
        for _ in range(20):
            setting.guard.record_step(StepPlan(scheduled, 1), StepResult((), forward_ns=forward_ns, graph_size=1))
        setting.poll_with_others(5.9)
    assert not any("Sysmem" in note for note in setting.notes)

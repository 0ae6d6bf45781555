"""CPU threads are reduced for busy neighbours and restored; scheduler statistics are simulated, and read for real
once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine.model.platforms import cpu_threads
from kvscope_engine.model.platforms.cpu_threads import CpuThreads, TaskTimes, default_num_threads, task_times


class SimulatedMachine:
    """A clock, and threads of which some wait for a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, free: int | None = None) -> None:
        monkeypatch.setattr(cpu_threads, "default_num_threads", lambda: cores)
        self.cores, self.now, self.count = cores, 100.0, 0
        self.free = cores if free is None else free
        self.times = dict.fromkeys(range(cores), (0, 0))
        self.history: list[int] = []

    def threads(self, num_threads: int | None = None) -> CpuThreads:
        return CpuThreads(num_threads, read=lambda: dict(self.times), apply=self.apply, clock=lambda: self.now)

    def apply(self, count: int) -> None:
        self.count = count
        self.history.append(count)

    def work(self, threads: CpuThreads, seconds: float, step_s: float = 0.05) -> None:
        """Run steps; each thread gets its share of the free cores and waits for the rest of the time."""
        for _ in range(round(seconds / step_s)):
            share = min(1.0, self.free / self.count)
            for task in range(self.count):
                ran, waited = self.times[task]
                self.times[task] = (ran + int(step_s * share * 1e9), waited + int(step_s * (1 - share) * 1e9))
            self.now += step_s
            threads.refresh()


def test_cpu_threads_are_not_reduced_if_no_other_process_competes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=4)
    machine.work(machine.threads(), 60)
    assert machine.history == [4]


@pytest.mark.parametrize(("cores", "free", "left"), [(2, 1, 1), (8, 7, 7), (8, 4, 4), (2, 0, 1)])
def test_cpu_threads_are_reduced_by_the_number_that_wait_for_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, free: int, left: int
) -> None:
    machine = SimulatedMachine(monkeypatch, cores, free)
    machine.work(machine.threads(), 0.9)
    assert machine.history == [cores, left]


def test_cpu_threads_are_restored_when_the_competing_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    machine.work(threads, 10)
    assert machine.history == [2, 1]
    machine.free = 2
    machine.work(threads, 2)
    assert (machine.history, threads.count) == ([2, 1, 2], 2)


def test_attempts_to_restore_cpu_threads_become_rarer_while_a_process_competes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core is free: one thread runs undisturbed, two do not. A retry costs a quarter of a second."""
    machine = SimulatedMachine(monkeypatch, cores=2, free=1)
    threads = machine.threads()
    machine.work(threads, 130)
    assert 8 <= machine.history.count(2) <= 14
    machine.free = 2
    machine.work(threads, 20)
    assert threads.count == 2


def test_requested_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=4, free=0)
    machine.work(machine.threads(3), 10)
    assert machine.history == [3]


def test_idle_engine_keeps_its_number_of_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    for _ in range(100):
        machine.now += 1.0
        threads.refresh()
    assert machine.history == [2]


def test_cpu_threads_are_not_reduced_if_scheduler_statistics_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=2, free=0)
    threads = CpuThreads(None, read=dict, apply=machine.apply, clock=lambda: machine.now)
    machine.work(threads, 5)
    assert machine.history == [2]


def test_closing_the_engine_restores_all_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    machine.work(threads, 1)
    threads.close()
    threads.close()
    assert machine.history == [2, 1, 2]


def test_thread_environment_variable_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert default_num_threads() == 64
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_num_threads() == 4


def test_scheduler_statistics_of_this_process_are_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("1200 340 5\n")
    (tmp_path / "8").mkdir()
    assert task_times(tmp_path) == {7: (1200, 340)}
    assert task_times(tmp_path / "nowhere") == {}
    found: TaskTimes = task_times()
    assert all(ran >= 0 and waited >= 0 for ran, waited in found.values())

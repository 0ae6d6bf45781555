"""Threads give way to busy neighbours and come back; the kernel's account is played, once it is the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine.model.platforms import cpu_threads
from kvscope_engine.model.platforms.cpu_threads import CpuThreads, TaskTimes, default_num_threads, task_times


class Machine:
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
        """Step after step; each thread gets its share of the free cores and waits the rest of the time."""
        for _ in range(round(seconds / step_s)):
            share = min(1.0, self.free / self.count)
            for task in range(self.count):
                ran, waited = self.times[task]
                self.times[task] = (ran + int(step_s * share * 1e9), waited + int(step_s * (1 - share) * 1e9))
            self.now += step_s
            threads.refresh()


def test_without_neighbours_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=4)
    machine.work(machine.threads(), 60)
    assert machine.history == [4]


@pytest.mark.parametrize(("cores", "free", "left"), [(2, 1, 1), (8, 7, 7), (8, 4, 4), (2, 0, 1)])
def test_one_thread_fewer_for_each_that_waits(
    monkeypatch: pytest.MonkeyPatch, cores: int, free: int, left: int
) -> None:
    machine = Machine(monkeypatch, cores, free)
    machine.work(machine.threads(), 0.9)
    assert machine.history == [cores, left]


def test_all_come_back_when_the_neighbour_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    machine.work(threads, 10)
    assert machine.history == [2, 1]
    machine.free = 2
    machine.work(threads, 2)
    assert (machine.history, threads.count) == ([2, 1, 2], 2)


def test_a_neighbour_that_stays_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core is free: one thread is calm, two are not. Trying costs a quarter of a second."""
    machine = Machine(monkeypatch, cores=2, free=1)
    threads = machine.threads()
    machine.work(threads, 130)
    assert 8 <= machine.history.count(2) <= 14
    machine.free = 2
    machine.work(threads, 20)
    assert threads.count == 2


def test_a_number_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=4, free=0)
    machine.work(machine.threads(3), 10)
    assert machine.history == [3]


def test_an_idle_engine_concludes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    for _ in range(100):
        machine.now += 1.0
        threads.refresh()
    assert machine.history == [2]


def test_without_an_account_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=2, free=0)
    threads = CpuThreads(None, read=dict, apply=machine.apply, clock=lambda: machine.now)
    machine.work(threads, 5)
    assert machine.history == [2]


def test_at_the_end_torch_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=2, free=0)
    threads = machine.threads()
    machine.work(threads, 1)
    threads.close()
    threads.close()
    assert machine.history == [2, 1, 2]


def test_who_told_a_library_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert default_num_threads() == 64
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_num_threads() == 4


def test_the_kernels_account_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("1200 340 5\n")
    (tmp_path / "8").mkdir()
    assert task_times(tmp_path) == {7: (1200, 340)}
    assert task_times(tmp_path / "nowhere") == {}
    found: TaskTimes = task_times()
    assert all(ran >= 0 and waited >= 0 for ran, waited in found.values())

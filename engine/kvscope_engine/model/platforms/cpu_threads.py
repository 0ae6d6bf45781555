"""Number of CPU threads of a model, reduced while other programs use the cores.

The threads of a parallel matmul wait for each other by spinning, some hundred times per token. That is fastest if each
has its own core. With another busy process it is slowest: all threads spin for the one that is not running, and use up
the CPU time that it needs (measured on two cores: a fifth of the speed with two threads, half with one). Not spinning
at all costs a quarter of the speed on an idle machine, so the number of threads is changed instead: one fewer for each
thread that was waiting for a core, according to the kernel's accounting.

A process of lower priority does not make threads wait, so it changes nothing. When no thread waits any more, all
threads are tried again: after a second at first, and after twice as long each time that the attempt was too early.

Owns torch's number of threads while an engine on a CPU runs. Used on the engine's thread, between steps. See
docs/internals/decisions/0014-busy-cpus-get-fewer-threads.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from kvscope_engine.model.platforms.cpu_count import THREAD_COUNT_VARIABLES, usable_cores

CHECK_INTERVAL_S: Final = 0.25
MIN_MEASURED_S: Final = 0.1
"""Minimum seconds that threads must have run or waited, in total, before the average number of waiting threads
is computed.
"""
MAX_WAITING_THREADS: Final = 0.3
"""Average number of threads waiting for a core above which threads are removed."""
FEW_WAITING_THREADS: Final = 0.15
"""Average number of threads waiting for a core below which all threads are tried again."""
RETRY_DELAYS_S: Final = (1.0, 16.0)
"""Initial and maximum seconds from a reduction until all threads are tried again."""

TaskTimes = dict[int, tuple[int, int]]
"""Nanoseconds that a thread ran on a core, and nanoseconds that it waited for one, by thread id."""


class CpuThreads:
    """Sets the number of threads at construction, and adapts it in `refresh` unless the user chose it."""

    def __init__(
        self,
        num_threads: int | None,
        *,
        read: Callable[[], TaskTimes] | None = None,
        apply: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the number of threads to `num_threads`. If that is None, choose the number and adapt it in `refresh`."""
        self._read = read or task_times
        self._apply = apply
        self._clock = clock
        self._max_threads = num_threads or default_num_threads()
        self._is_adaptive = num_threads is None and self._max_threads > 1
        self._count = self._max_threads
        self._previous_times = self._read() if self._is_adaptive else {}
        self._next_check_s = self._clock() + CHECK_INTERVAL_S
        self._retry_delay_s = RETRY_DELAYS_S[0]
        self._retry_at_s = self._restored_at_s = 0.0
        self._apply(self._max_threads)

    @property
    def count(self) -> int:
        return self._count

    @property
    def is_reduced(self) -> bool:
        """Whether fewer threads compute than on an idle machine."""
        return self._count < self._max_threads

    def refresh(self) -> None:
        """Remove a thread for each one that waits for a core, or restore all threads. Call this often; only one
        call per `CHECK_INTERVAL_S` measures.
        """
        if not self._is_adaptive or (now_s := self._clock()) < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        times = self._read()
        ran_ns, waited_ns = _elapsed_ns(self._previous_times, times)
        if ran_ns + waited_ns < MIN_MEASURED_S * 1e9:
            return
        self._previous_times = times
        waiting = self._count * waited_ns / (ran_ns + waited_ns)
        if waiting > MAX_WAITING_THREADS and self._count > 1:
            self._lower(waiting, now_s)
        elif waiting < FEW_WAITING_THREADS and self._count < self._max_threads and now_s >= self._retry_at_s:
            self._restored_at_s = now_s
            self._set(self._max_threads)

    def close(self) -> None:
        """Restore the full number of threads."""
        if self._count != self._max_threads:
            self._set(self._max_threads)

    def _lower(self, waiting: float, now_s: float) -> None:
        # Threads were restored too early if they have to be removed again soon afterwards: then wait longer next time.
        was_early = self._restored_at_s and now_s - self._restored_at_s < 2 * self._retry_delay_s
        self._retry_delay_s = min(2 * self._retry_delay_s, RETRY_DELAYS_S[1]) if was_early else RETRY_DELAYS_S[0]
        self._retry_at_s = now_s + self._retry_delay_s
        self._set(max(1, self._count - math.ceil(waiting)))

    def _set(self, count: int) -> None:
        self._count = count
        self._apply(count)
        self._previous_times = self._read()


def default_num_threads() -> int:
    """Return the number of usable cores, at most torch's own default.

    If one of `THREAD_COUNT_VARIABLES` is set, returns torch's default, which respects it.
    """
    if any(os.environ.get(name) for name in THREAD_COUNT_VARIABLES):
        return torch.get_num_threads()
    return min(torch.get_num_threads(), usable_cores())


def task_times(tasks: Path = Path("/proc/self/task")) -> TaskTimes:
    """Return the `TaskTimes` of this process's threads; empty if the kernel does not record them."""
    times: TaskTimes = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(tasks):
            with contextlib.suppress(OSError, ValueError):  # a thread may end meanwhile
                ran, waited, _ = (tasks / name / "schedstat").read_text(encoding="ascii").split()
                times[int(name)] = (int(ran), int(waited))
    return times


def _elapsed_ns(previous: TaskTimes, current: TaskTimes) -> tuple[int, int]:
    """Return the nanoseconds run and waited between two samples, summed over the threads in both samples."""
    common = previous.keys() & current.keys()
    return (
        sum(current[task][0] - previous[task][0] for task in common),
        sum(current[task][1] - previous[task][1] for task in common),
    )

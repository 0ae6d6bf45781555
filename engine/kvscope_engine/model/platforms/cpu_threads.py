"""Number of CPU threads of a model, reduced while other programs use the cores.

The threads of a parallel product wait for each other by spinning, some hundred times per token. That is fastest if each
has its own core. With a busy process in parallel it is slowest: all threads spin for the one that is not running, and
use up the CPU time that it needs (measured on two cores: a fifth of the speed with two threads, half with one). Not
spinning at all costs a quarter of the speed on an idle machine, so the number of threads is changed instead: one fewer
for each thread that was waiting for a core, according to the kernel's accounting.

A process of lower priority that yields is not noticed, and need not be. When no thread waits any more, all threads are
tried again, after a second at first, and after twice as long each time that it was too early.

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

LOOK_S: Final = 0.25
"""Seconds between two checks."""
EVIDENCE_S: Final = 0.1
"""Minimum total seconds for which threads must have run or waited before a decision is made."""
CROWDED: Final = 0.3
"""Average number of threads waiting for a core above which there are too many."""
CALM: Final = 0.15
"""Average number of threads waiting for a core below which more may be possible."""
RETRY_S: Final = (1.0, 16.0)
"""Seconds after a reduction until all threads are tried again: initial and maximum."""

TaskTimes = dict[int, tuple[int, int]]
"""For each thread id: nanoseconds on a core, and nanoseconds waiting for one."""


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
        """`num_threads` is a fixed number; None: chosen automatically."""
        self._read = read or task_times
        self._apply = apply
        self._clock = clock
        self._full = num_threads or default_num_threads()
        self._is_free = num_threads is None and self._full > 1
        self._count = self._full
        self._before = self._read() if self._is_free else {}
        self._next_look = self._clock() + LOOK_S
        self._retry_s = RETRY_S[0]
        self._retry_at = self._raised_at = 0.0
        self._apply(self._full)

    @property
    def count(self) -> int:
        return self._count

    def refresh(self) -> None:
        """Remove a thread for each one that waits, or restore all. Call it often; it checks every `LOOK_S`."""
        if not self._is_free or (now := self._clock()) < self._next_look:
            return
        self._next_look = now + LOOK_S
        times = self._read()
        ran, waited = _passed(self._before, times)
        if ran + waited < EVIDENCE_S * 1e9:
            return
        self._before = times
        waiting = self._count * waited / (ran + waited)
        if waiting > CROWDED and self._count > 1:
            self._lower(waiting, now)
        elif waiting < CALM and self._count < self._full and now >= self._retry_at:
            self._raised_at = now
            self._set(self._full)

    def close(self) -> None:
        """Restore the full number of threads."""
        if self._count != self._full:
            self._set(self._full)

    def _lower(self, waiting: float, now: float) -> None:
        was_early = self._raised_at and now - self._raised_at < 2 * self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S[1]) if was_early else RETRY_S[0]
        self._retry_at = now + self._retry_s
        self._set(max(1, self._count - math.ceil(waiting)))

    def _set(self, count: int) -> None:
        self._count = count
        self._apply(count)
        self._before = self._read()


def default_num_threads() -> int:
    """Return the number of usable cores, at most torch's own choice; variables in `THREAD_COUNT_VARIABLES` take
    precedence.
    """
    if any(os.environ.get(name) for name in THREAD_COUNT_VARIABLES):
        return torch.get_num_threads()
    return min(torch.get_num_threads(), usable_cores())


def task_times(tasks: Path = Path("/proc/self/task")) -> TaskTimes:
    """Return the times of this process's threads; empty if the kernel does not record them."""
    found: TaskTimes = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(tasks):
            with contextlib.suppress(OSError, ValueError):  # a thread may end meanwhile
                ran, waited, _ = (tasks / name / "schedstat").read_text(encoding="ascii").split()
                found[int(name)] = (int(ran), int(waited))
    return found


def _passed(before: TaskTimes, now: TaskTimes) -> tuple[int, int]:
    """Return nanoseconds run and waited between two samples, over threads in both."""
    both = before.keys() & now.keys()
    return (
        sum(now[task][0] - before[task][0] for task in both),
        sum(now[task][1] - before[task][1] for task in both),
    )

"""The CPU threads a model computes with, fewer while other programs use the cores.

The threads of a parallel product wait for each other by spinning, some hundred times a token. That is the quickest
where each has a core of its own. Beside a busy process it is the slowest: all spin for the one that is not running,
and pay for it with the CPU time it would need (measured on two cores: a fifth of the speed with two threads, half with
one). Not spinning at all costs a quarter of the speed when nobody else is there, so it is the number of threads that
changes: one fewer for each that was found waiting for a core. The kernel tells how long they waited.

A neighbour of lower priority that gives way is not noticed, and need not be. Once nobody waits any longer all threads
are tried again, after a second, and twice as late each time that it was too early.

Owns torch's number of threads while an engine on a CPU lives. Used on the engine's thread, between steps.

See docs/internals/decisions/0014-busy-cpus-get-fewer-threads.md.
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

from kvscope_engine.model.platforms.cpu_count import TOLD_BY, usable_cores

LOOK_S: Final = 0.25
"""How often it is looked at."""
EVIDENCE_S: Final = 0.1
"""Of time that threads ran or waited, before anything is concluded from it."""
CROWDED: Final = 0.3
"""Threads that wait for a core, on average, from which on there are too many."""
CALM: Final = 0.15
"""And below which there may be room for more."""
RETRY_S: Final = (1.0, 16.0)
"""How long after threads were taken away they are tried again: at first, and at last."""

TaskTimes = dict[int, tuple[int, int]]
"""Of each thread: nanoseconds on a core, and nanoseconds waiting for one."""


class CpuThreads:
    """Sets the number of threads at construction, and again at `look` where it is free to."""

    def __init__(
        self,
        num_threads: int | None,
        *,
        read: Callable[[], TaskTimes] | None = None,
        apply: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `num_threads` it is that number, always; None chooses."""
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
        """Threads at present."""
        return self._count

    def look(self) -> None:
        """Take a thread away for each that waits, or give all back."""
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
        """Leave all the threads to torch."""
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
    """The cores this process may use, torch's own choice at most; who told a library otherwise is heard."""
    if any(os.environ.get(name) for name in TOLD_BY):
        return torch.get_num_threads()
    return min(torch.get_num_threads(), usable_cores())


def task_times(tasks: Path = Path("/proc/self/task")) -> TaskTimes:
    """Of the threads of this process; empty where the kernel keeps no such account."""
    found: TaskTimes = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(tasks):
            with contextlib.suppress(OSError, ValueError):  # a thread may end meanwhile
                ran, waited, _ = (tasks / name / "schedstat").read_text(encoding="ascii").split()
                found[int(name)] = (int(ran), int(waited))
    return found


def _passed(before: TaskTimes, now: TaskTimes) -> tuple[int, int]:
    """Nanoseconds run and waited since, of the threads that were there."""
    both = before.keys() & now.keys()
    return (
        sum(now[task][0] - before[task][0] for task in both),
        sum(now[task][1] - before[task][1] for task in both),
    )

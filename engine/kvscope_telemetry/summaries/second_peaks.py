"""Maximum pool usage and maximum numbers of requests within one second, from the frames of that second.

The levels of a `Summary` are those at the end of its second. Only peaks show rises and falls within the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import Counters, Frame, Snapshot
from kvscope_telemetry.mirror.mirror import Mirror

IntArray = npt.NDArray[np.int64]


class Peak(NamedTuple):
    """Largest value within one second, including the value at its start, and the log time when it was first reached."""

    value: int
    time_ns: int


class Peaks(NamedTuple):
    active_blocks: Peak
    running: Peak
    waiting: Peak


@dataclass(frozen=True, slots=True)
class _Change:
    time_ns: int
    ids: bytes
    states: bytes


class SecondPeaks:
    """Computes the peaks of one second from its snapshots and frames. Call `begin` with the state at the
    second's start.
    """

    def __init__(self) -> None:
        self._begin_ns = 0
        self._active = np.empty(0, np.bool_)
        self._running = self._waiting = Peak(0, 0)
        self._changes: list[_Change] = []

    def begin(self, mirror: Mirror, time_ns: int) -> None:
        self._begin_ns = time_ns
        self._active = mirror.ledger.state[: mirror.num_blocks] == BlockState.ACTIVE
        self._changes = []
        self._running = self._waiting = Peak(0, time_ns)
        self._count(mirror.counters, time_ns)

    def restart(self, snapshot: Snapshot, time_ns: int, *, is_new_start: bool) -> None:
        """Add a snapshot. After a new engine start, only later messages count, because the pool was replaced."""
        num_blocks = snapshot.hello.cache.num_blocks
        states = snapshot.blocks.state[:num_blocks]
        if is_new_start or num_blocks != self._active.size:
            self._begin_ns, self._changes = time_ns, []
            self._running = self._waiting = Peak(0, time_ns)
            self._active = np.frombuffer(states, "u1") == BlockState.ACTIVE
        elif states:
            self._changes.append(_Change(time_ns, np.arange(len(states), dtype="<u4").tobytes(), states))
        self._count(snapshot.counters, time_ns)

    def add(self, frame: Frame, time_ns: int) -> None:
        if frame.blocks.ids:
            self._changes.append(_Change(time_ns, frame.blocks.ids, frame.blocks.state))
        self._count(frame.counters, time_ns)

    def peaks(self) -> Peaks:
        active = Peak(int(np.count_nonzero(self._active)), self._begin_ns)
        levels = active.value + np.cumsum(self._deltas())
        if levels.size and levels.max() > active.value:
            active = Peak(int(levels.max()), self._changes[int(np.argmax(levels))].time_ns)
        return Peaks(active, self._running, self._waiting)

    def _count(self, counters: Counters, time_ns: int) -> None:
        if counters.num_running > self._running.value:
            self._running = Peak(counters.num_running, time_ns)
        if counters.num_waiting > self._waiting.value:
            self._waiting = Peak(counters.num_waiting, time_ns)

    def _deltas(self) -> IntArray:
        """Return the increase of the number of active blocks by each collected change (a frame or snapshot),
        shape (num_changes,).
        """
        ids = np.frombuffer(b"".join([change.ids for change in self._changes]), "<u4").astype(np.int64)
        states = np.frombuffer(b"".join([change.states for change in self._changes]), "u1")
        numbers = np.repeat(np.arange(len(self._changes)), [len(change.ids) // 4 for change in self._changes])
        in_pool = ids < self._active.size
        ids, is_active, numbers = ids[in_pool], states[in_pool] == BlockState.ACTIVE, numbers[in_pool]
        order = np.argsort(ids, kind="stable")  # rows of one block in the order of the changes
        ids, is_active, numbers = ids[order], is_active[order], numbers[order]
        is_first = np.diff(ids, prepend=-1) != 0
        before = np.where(is_first, self._active[ids], np.roll(is_active, 1))
        rise = is_active.astype(np.int64) - before
        return np.bincount(numbers, rise, len(self._changes)).astype(np.int64)

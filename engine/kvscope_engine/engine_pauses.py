"""Tracks when the engine does not run: paused by a user, or suspended with its process or machine.

`EnginePauses` publishes pauses and suspensions as events, and maintains the scheduler's running time, in which all
latencies of the engine are measured. Independent of clients (`server/client_interventions.py`) and of steps.

A suspended process cannot report its suspension, so `SuspensionWatch` detects it afterwards, by either of two signs.
Either CLOCK_BOOTTIME, which includes the machine's sleep, advanced further than the monotonic clock. Or no thread gave
a heartbeat for much longer than was due, while the process used almost no processor time; a process that computes or
waits for the interpreter's lock uses some.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_telemetry.messages.event_kinds import with_cause
from kvscope_telemetry.messages.telemetry import Event, EventData

HEARTBEAT_NS: Final = 500_000_000
"""Maximum nanoseconds between two heartbeats of a running process."""
MIN_SUSPENSION_NS: Final = 1_500_000_000
"""Minimum delay of a heartbeat in ns, beyond `HEARTBEAT_NS`, that counts as a suspension.

On a busy machine, a thread may wait for some tenths of a second, which is no suspension.
"""
MIN_SLEEP_NS: Final = 500_000_000
_MAX_BUSY_SHARE: Final = 0.2
"""Maximum processor time of this process since the last heartbeat, as a fraction of the elapsed time, for a late
heartbeat to count as a suspension. A process that used more was not suspended, but busy.
"""


@dataclass(frozen=True, slots=True)
class Clocks:
    now_ns: int
    """Monotonic time, which does not advance while the machine sleeps."""
    slept_ns: int
    """Total time that the machine has slept since it booted."""
    worked_ns: int
    """Processor time of the process."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """Suspension of the process or machine. Times are monotonic, in nanoseconds."""

    start_ns: int
    """Last heartbeat before the suspension. Equals `end_ns` if the machine slept, because monotonic time does not
    advance meanwhile.
    """
    end_ns: int
    slept_ns: int

    @property
    def lasted_ns(self) -> int:
        """Duration of the suspension, including the machine's sleep."""
        return self.end_ns - self.start_ns + self.slept_ns


def read_clocks() -> Clocks:
    now_ns = time.monotonic_ns()
    boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else now_ns
    return Clocks(now_ns, boot_ns - now_ns, time.process_time_ns())


class SuspensionWatch:
    """Detects suspensions of this process after the first `beat`. Thread-safe."""

    def __init__(self, clocks: Callable[[], Clocks] = read_clocks) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()
        self._last: Clocks | None = None
        self._suspensions: list[Suspension] = []

    def beat(self) -> bool:
        """Record a heartbeat from a thread that calls this at least every `HEARTBEAT_NS`. Returns whether suspensions
        are pending.
        """
        with self._lock:
            last, current = self._last, self._clocks()
            self._last = current
            if last is not None and (suspension := _suspension(last, current)) is not None:
                self._suspensions.append(suspension)
            return bool(self._suspensions)

    def poll(self) -> bool:
        """Record a heartbeat from a thread that calls this irregularly. Ignored before the first `beat`. Returns
        whether suspensions are pending.
        """
        return self._last is not None and self.beat()

    def drain(self) -> list[Suspension]:
        with self._lock:
            suspensions, self._suspensions = self._suspensions, []
            return suspensions


class EnginePauses:
    """Pauses and suspensions of one engine. `record` publishes changes that were made without a step.

    All methods except `beat` are called on the engine's thread.
    """

    def __init__(
        self, scheduler: Scheduler, record: Callable[[], None], clocks: Callable[[], Clocks] = read_clocks
    ) -> None:
        self._scheduler = scheduler
        self._running = scheduler.running_time
        self._record = record
        self._suspension_watch = SuspensionWatch(clocks)
        self._paused_ns = 0

    def pause(self, by: str) -> None:
        if self._running.open is None:
            self._paused_ns = time.monotonic_ns()
            self._running.record(self._record_event(self._paused_ns, EventData(kind="engine_paused", by=by)))
        else:
            self._scheduler.changes.record_notice(f"{by} paused the engine as well", time.monotonic_ns())
        self._record()

    def resume(self, why: str) -> None:
        open_pause = self._running.open
        if open_pause is not None:
            now_ns = time.monotonic_ns()
            lasted_ns = now_ns - self._paused_ns
            data = EventData(kind="engine_resumed", by=open_pause.by, lasted_ns=lasted_ns, why=why)
            self._running.record(self._record_event(now_ns, data))
            self._record()

    @contextmanager
    def single_step(self, by: str) -> Iterator[None]:
        """Return a context in which a paused engine runs one step, requested by the client `by`. The time of
        this step counts as running time.
        """
        open_pause, began_ns = self._running.open, time.monotonic_ns()
        self._running.end(began_ns)
        yield
        if open_pause is not None:
            ended_ns = time.monotonic_ns()
            self._running.begin(ended_ns, open_pause.by)
            self._record_event(ended_ns, EventData(kind="single_step", by=by, lasted_ns=ended_ns - began_ns))
            self._record()

    def beat(self) -> bool:
        """Record a heartbeat, on any thread. Returns whether suspensions are pending."""
        return self._suspension_watch.beat()

    def report_suspensions(self) -> None:
        if self._suspension_watch.poll():
            self._record()

    def record_suspensions(self) -> None:
        """Record pending suspensions. Called before a latency is measured or a frame is built."""
        if not self._suspension_watch.poll():
            return
        for suspension in self._suspension_watch.drain():
            data = EventData(kind="process_suspended", lasted_ns=suspension.lasted_ns, slept_ns=suspension.slept_ns)
            self._running.record(self._record_event(suspension.end_ns, data))

    def _record_event(self, time_ns: int, data: EventData) -> Event:
        event = with_cause(Event(kind=data.kind, time_ns=time_ns, data=data))
        self._scheduler.changes.record_event(event)
        return event


def _suspension(last: Clocks, current: Clocks) -> Suspension | None:
    silent_ns, slept_ns = current.now_ns - last.now_ns, max(0, current.slept_ns - last.slept_ns)
    is_idle = current.worked_ns - last.worked_ns < _MAX_BUSY_SHARE * silent_ns
    is_silent = silent_ns > HEARTBEAT_NS + MIN_SUSPENSION_NS and is_idle
    if not is_silent and slept_ns < MIN_SLEEP_NS:
        return None
    slept_ns = slept_ns if slept_ns >= MIN_SLEEP_NS else 0
    return Suspension(last.now_ns if is_silent else current.now_ns, current.now_ns, slept_ns)

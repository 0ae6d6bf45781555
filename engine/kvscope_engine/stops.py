"""When the engine stands still: paused by a person, or suspended with its process or machine. Told as events, at once.

`EngineStops` writes the scheduler's running time, in which every latency of the engine is measured. It knows neither
who may pause (`server/pauses.py`) nor what a step is.

A process that is suspended cannot say so itself, so `SuspensionWatch` notices afterwards, by one of two signs. The
clock that counts a machine's sleep (CLOCK_BOOTTIME) went ahead of the one that does not. Or no thread gave a sign of
life for long beyond what was due, while the process used next to no processor time: one that computes through the
silence, or waits for the interpreter's lock, uses some.
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

DUE_NS: Final = 500_000_000
"""Somebody looks at least so often: with each heartbeat."""
LEAST_NS: Final = 1_500_000_000
"""Beyond what was due: a busy machine keeps a thread from running for some tenths of a second."""
LEAST_SLEEP_NS: Final = 500_000_000
_MOST_BUSY: Final = 0.2
"""Of one processor, in a silence that is a suspension."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """What a look reads, all in nanoseconds."""

    now_ns: int
    """Monotonic: it stands still while the machine sleeps."""
    slept_ns: int
    """How long the machine slept since it started."""
    worked_ns: int
    """Processor time of the process."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """One silence. Times are monotonic."""

    begin_ns: int
    """The last sign of life before it; of a machine's sleep, which takes no monotonic time, the same as its end."""
    end_ns: int
    slept_ns: int

    @property
    def lasted_ns(self) -> int:
        """How long it was for people."""
        return self.end_ns - self.begin_ns + self.slept_ns


def read_clocks() -> Clocks:
    """As they are now."""
    now_ns = time.monotonic_ns()
    boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else now_ns
    return Clocks(now_ns, boot_ns - now_ns, time.process_time_ns())


class SuspensionWatch:
    """One for a process. It watches from the first beat on; all may be called on any thread."""

    def __init__(self, clocks: Callable[[], Clocks] = read_clocks) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()
        self._last: Clocks | None = None
        self._found: list[Suspension] = []

    def beat(self) -> bool:
        """A sign of life of a thread that gives one every `DUE_NS`; whether there is something to take."""
        with self._lock:
            last, now = self._last, self._clocks()
            self._last = now
            if last is not None and (found := _suspension(last, now)) is not None:
                self._found.append(found)
            return bool(self._found)

    def look(self) -> bool:
        """The same of a thread that gives one when it can; nothing while nobody beats."""
        return self._last is not None and self.beat()

    def drain(self) -> list[Suspension]:
        """What was found since the last call, oldest first."""
        with self._lock:
            found, self._found = self._found, []
            return found


class EngineStops:
    """One for an engine. `record` publishes what changed without a step. All but `beat` is for the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, record: Callable[[], None], clocks: Callable[[], Clocks] = read_clocks
    ) -> None:
        self._scheduler = scheduler
        self._running = scheduler.running_time
        self._record = record
        self._watch = SuspensionWatch(clocks)
        self._paused_ns = 0

    def pause(self, by: str) -> None:
        """No step is run from now on, since `by` asked for it."""
        if self._running.open is None:
            self._paused_ns = time.monotonic_ns()
            self._running.note(self._tell(self._paused_ns, EventData(kind="engine_paused", by=by)))
        else:
            self._scheduler.note(f"{by} paused the engine as well", time.monotonic_ns())
        self._record()

    def resume(self, why: str) -> None:
        """Steps are run again, for the reason `why`."""
        stop = self._running.open
        if stop is not None:
            now_ns = time.monotonic_ns()
            lasted_ns = now_ns - self._paused_ns
            data = EventData(kind="engine_resumed", by=stop.by, lasted_ns=lasted_ns, why=why)
            self._running.note(self._tell(now_ns, data))
            self._record()

    @contextmanager
    def single_step(self, by: str) -> Iterator[None]:
        """Time runs inside though the engine is paused: `by` asked for the step that is run there."""
        stop, began_ns = self._running.open, time.monotonic_ns()
        self._running.end(began_ns)
        yield
        if stop is not None:
            ended_ns = time.monotonic_ns()
            self._running.begin(ended_ns, stop.by)
            self._tell(ended_ns, EventData(kind="single_step", by=by, lasted_ns=ended_ns - began_ns))
            self._record()

    def beat(self) -> bool:
        """Called with each heartbeat, on its thread; whether there is a suspension to tell of."""
        return self._watch.beat()

    def report_suspensions(self) -> None:
        """Publish those that are over, where no step does."""
        if self._watch.look():
            self._record()

    def notice(self) -> None:
        """Take in suspensions that are over, before a latency is measured or a frame is made."""
        if not self._watch.look():
            return
        for found in self._watch.drain():
            data = EventData(kind="process_suspended", lasted_ns=found.lasted_ns, slept_ns=found.slept_ns)
            self._running.note(self._tell(found.end_ns, data))

    def _tell(self, time_ns: int, data: EventData) -> Event:
        event = with_cause(Event(kind=data.kind, time_ns=time_ns, data=data))
        self._scheduler.tell(event)
        return event


def _suspension(last: Clocks, now: Clocks) -> Suspension | None:
    silent_ns, slept_ns = now.now_ns - last.now_ns, max(0, now.slept_ns - last.slept_ns)
    is_idle = now.worked_ns - last.worked_ns < _MOST_BUSY * silent_ns
    is_silent = silent_ns > DUE_NS + LEAST_NS and is_idle
    if not is_silent and slept_ns < LEAST_SLEEP_NS:
        return None
    slept_ns = slept_ns if slept_ns >= LEAST_SLEEP_NS else 0
    return Suspension(last.now_ns if is_silent else now.now_ns, now.now_ns, slept_ns)

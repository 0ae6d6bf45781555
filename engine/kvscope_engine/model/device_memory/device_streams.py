"""Two in-order streams of a device, called lanes: one lane computes, the other copies concurrently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import torch

Lane: TypeAlias = Literal["compute", "copy"]


class StreamMark(Protocol):
    """An event recorded in a lane."""

    def has_passed(self) -> bool: ...

    def seconds_since(self, earlier: StreamMark) -> float:
        """Return the device time in seconds from the event `earlier` to this event. The device must have
        reached both events.
        """


class Streams(Protocol):
    """Enqueues work on the two lanes. Only `finish` waits for the device."""

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Call `work`. The kernels and copies that it starts run on `lane`, after all earlier work there."""

    def mark(self, lane: Lane) -> StreamMark:
        """Record an event after everything enqueued on `lane`."""

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        """Make work that is enqueued on `lane` after this call wait for `mark`."""

    def finish(self, lane: Lane) -> None:
        """Block until `lane` has completed all its work."""


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def has_passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: StreamMark) -> float:
        assert isinstance(earlier, CudaMark), "marks of one kind are compared"
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """Uses the current stream for computing, and a separate stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: Lane) -> StreamMark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return CudaMark(event)

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        assert isinstance(mark, CudaMark), "a CUDA stream waits for a CUDA event"
        self._stream(lane).wait_event(mark.event)

    def finish(self, lane: Lane) -> None:
        self._stream(lane).synchronize()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy if lane == "copy" else torch.cuda.current_stream(self._device)

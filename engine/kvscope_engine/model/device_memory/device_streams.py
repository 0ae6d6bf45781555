"""Two lanes of a device: the one that computes, and one beside it that copies. Work on a lane runs in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import torch

Lane: TypeAlias = Literal["compute", "copy"]


class StreamMark(Protocol):
    """A point of a lane."""

    def is_past(self) -> bool:
        """Whether the lane has come by here."""

    def seconds_since(self, earlier: StreamMark) -> float:
        """Device time between two points that are past."""


class Streams(Protocol):
    """Hands work to the lanes; only `finish` waits for any."""

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """`work` starts kernels and copies, which run on `lane` after all before."""

    def mark(self, lane: Lane) -> StreamMark:
        """A point behind everything that `lane` was given."""

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        """What `lane` is given from now on runs after `mark` is past."""

    def finish(self, lane: Lane) -> None:
        """Wait until `lane` has nothing left."""


class CudaMark:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_past(self) -> bool:
        """Whether the stream has come by here."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: StreamMark) -> float:
        """Device time between two points that are past."""
        assert isinstance(earlier, CudaMark), "marks of one kind are compared"
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """The stream that the model runs on, whichever is current, and a stream of our own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """`work` starts kernels and copies, which run on `lane` after all before."""
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: Lane) -> StreamMark:
        """A point behind everything that `lane` was given."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return CudaMark(event)

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        """What `lane` is given from now on runs after `mark` is past."""
        assert isinstance(mark, CudaMark), "a CUDA stream waits for a CUDA event"
        self._stream(lane).wait_event(mark.event)

    def finish(self, lane: Lane) -> None:
        """Wait until `lane` has nothing left."""
        self._stream(lane).synchronize()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy if lane == "copy" else torch.cuda.current_stream(self._device)

"""Recorded messages to updates, each of a short span of recorded time.

Owns what becomes of each kind of message: frames and snapshots that go on from the state there is, samples and
memory of that engine; the rest was for who was there. Knows neither files nor how fast it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Heartbeat,
    MemoryBreakdown,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.source import Update
from kvscope_telemetry.state.coalesce import coalesce
from kvscope_telemetry.state.continuity import Continuity

SPAN_NS: Final = 1_000_000_000
"""An update ends with the first frame that is so much later than the one before it: curves have no coarser steps."""
BEAT_NS: Final = 500_000_000
"""Where nothing happens for this long, a heartbeat says so."""


@dataclass(frozen=True, slots=True)
class Span:
    """An update, and the recorded time since the start up to which it goes."""

    update: Update
    until_ns: int
    jumped: bool = False
    """It begins after a seek: what was before it is not its past."""


class Spans:
    """Add messages in order; take what they come to.

    `memory_before(time_ns, epoch)` finds where the memory of an engine went that was followed from its middle.
    """

    def __init__(self, memory_before: Callable[[int, int], MemoryBreakdown | None]) -> None:
        self.continuity = Continuity()
        self._memory_before = memory_before
        self._done: list[Span] = []
        self._frames: list[Frame] = []
        self._snapshot: Snapshot | None = None
        self._samples: list[DeviceSample] = []
        self._readings: list[Reading] = []
        self._devices: list[Devices] = []
        self._memory: MemoryBreakdown | None = None
        self._until_ns = 0
        """Of the newest message that was taken."""
        self._told_ns = 0
        """Up to where the updates go so far."""
        self._offset_ns = 0
        """From the engine's clock to recorded time."""
        self._is_short = False
        self._has_heartbeats = False

    def begin_short(self, at_ns: int) -> None:
        """From `at_ns` on spans are short. What was added before is one, only a snapshot ends it."""
        self.close()
        self._is_short, self._told_ns = True, at_ns

    def add(self, at_ns: int, message: TelemetryMessage) -> None:
        """The next message, recorded at `at_ns` since the start."""
        if isinstance(message, Frame):
            self._add_frame(at_ns, message)
        elif isinstance(message, Snapshot):
            self._add_snapshot(at_ns, message)
        elif isinstance(message, Heartbeat):
            self._has_heartbeats = True
            if message.epoch == self.continuity.epoch and self._is_short:
                self._beat(at_ns)
        elif isinstance(message, DeviceSample) and message.epoch == self.continuity.epoch:
            self._samples.append(message)
        elif isinstance(message, Reading) and message.epoch == self.continuity.epoch:
            self._readings.append(message)
        elif isinstance(message, Devices) and message.epoch == self.continuity.epoch:
            self._devices.append(message)
        elif isinstance(message, MemoryBreakdown) and message.epoch == self.continuity.epoch:
            self._memory = message

    def close(self) -> None:
        """End the span in progress."""
        if self._snapshot is None and not (
            self._frames or self._samples or self._devices or self._memory or self._readings
        ):
            return
        update = coalesce(
            self._frames,
            snapshot=self._snapshot,
            samples=self._samples,
            devices=self._devices,
            memory=self._memory,
            readings=self._readings,
        )
        self._done.append(Span(update, self._until_ns))
        self._told_ns = self._until_ns
        self._frames, self._samples, self._devices, self._readings = [], [], [], []
        self._snapshot = self._memory = None

    def pass_time(self, until_ns: int) -> None:
        """Nothing more until `until_ns`: where the recording has no heartbeats this says that all stayed as it was."""
        if not self._is_short or until_ns - max(self._until_ns, self._told_ns) < BEAT_NS:
            return
        self.close()
        while not self._has_heartbeats and until_ns - self._told_ns >= BEAT_NS and not self.continuity.is_lost:
            self._beat(self._told_ns + BEAT_NS)

    def take(self) -> list[Span]:
        """What the messages since the last call come to."""
        self.close()
        done, self._done = self._done, []
        return done

    def _add_frame(self, at_ns: int, frame: Frame) -> None:
        if not self.continuity.takes(frame):
            return
        self.pass_time(at_ns - 1)
        self._frames.append(frame)
        self._is_at(at_ns, frame.time_ns)
        if self._is_short and at_ns - self._told_ns >= SPAN_NS:
            self.close()

    def _add_snapshot(self, at_ns: int, snapshot: Snapshot) -> None:
        before = self.continuity.epoch
        if not self.continuity.takes(snapshot):
            return
        self.close()
        self._snapshot = snapshot
        self._is_at(at_ns, snapshot.time_ns)
        if snapshot.hello.epoch != before:
            self._memory = self._memory_before(at_ns, snapshot.hello.epoch)

    def _is_at(self, at_ns: int, time_ns: int) -> None:
        self._until_ns, self._offset_ns = at_ns, at_ns - time_ns

    def _beat(self, at_ns: int) -> None:
        continuity = self.continuity
        if continuity.is_lost or continuity.epoch is None:
            return
        self.close()
        beat = Heartbeat(epoch=continuity.epoch, time_ns=at_ns - self._offset_ns, seq=continuity.seq, step=0)
        self._done.append(Span(Update(heartbeat=beat), at_ns))
        self._until_ns = self._told_ns = at_ns

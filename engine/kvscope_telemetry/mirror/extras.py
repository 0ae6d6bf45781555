"""Messages other than snapshots and frames that arrived in one pass of the reading thread: device samples, memory,
progress, heartbeat, readings.

Contains all samples and readings, but only the newest message of each other kind. Independent of the state and of
sequence numbers, because these messages are valid at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import DeviceSample, Heartbeat, MemoryBreakdown, Progress, Reading
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.source import Update


@dataclass(slots=True)
class Extras:
    """Messages collected by the reading thread, which converts them to one update per pass."""

    samples: list[DeviceSample] = field(default_factory=list)
    devices: list[Devices] = field(default_factory=list)
    memory: MemoryBreakdown | None = None
    progress: Progress | None = None
    heartbeat: Heartbeat | None = None
    readings: list[Reading] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        parts = (self.samples, self.devices, self.memory, self.progress, self.heartbeat, self.readings)
        return not any(parts)

    def update(self) -> Update:
        return coalesce(
            (),
            samples=self.samples,
            devices=self.devices,
            memory=self.memory,
            progress=self.progress,
            heartbeat=self.heartbeat,
            readings=self.readings,
        )

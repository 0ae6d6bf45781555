"""A queue of locally made messages for whoever takes updates, and for a sink: ordered, coalesced, bounded.

The same parts that a live source has, without its sockets. `give` belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from kvscope_telemetry.sources.sink import Sink, SinkFeed
from kvscope_telemetry.state.coalesce import Pending, coalesce
from kvscope_telemetry.state.extras import Extras


class UpdateQueue:
    """`take_update` and `set_sink` are for any thread."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._feed = SinkFeed(sink)
        self._pending = Pending()
        self._snapshot: Snapshot | None = None
        self._frames: list[Frame] = []
        self._extras = Extras()

    @property
    def num_discarded(self) -> int:
        """Frames that nobody took in time."""
        return self._pending.num_frames_discarded

    def set_sink(self, sink: Sink | None) -> None:
        """From the next messages on give to `sink`, or to nobody."""
        self._feed.set(sink)

    def wants_snapshot(self, now_ns: int) -> bool:
        """Whether the whole state has to be told: what waited was dropped, or a sink has none yet."""
        self._feed.begin_pass()
        return self._pending.take_overflow() or self._feed.wants_snapshot(now_ns)

    def give(self, messages: Iterable[TelemetryMessage]) -> None:
        """What is told, in order."""
        for message in messages:
            if isinstance(message, Snapshot | Frame):
                self._feed.passed(message, None)
                if isinstance(message, Snapshot):
                    self._flush()
                    self._snapshot = message
                else:
                    self._frames.append(message)
            else:
                self._feed.other(message, None)
                self._keep(message)
        self._flush()

    def take_update(self) -> Update | None:
        """What came since the last call, None when nothing did."""
        return self._pending.take_update()

    def discard(self) -> None:
        """Drop what waits: only a snapshot makes a new beginning."""
        self._pending.discard()

    def _keep(self, message: TelemetryMessage) -> None:
        extras = self._extras
        if isinstance(message, Reading):
            extras.readings.append(message)
        elif isinstance(message, DeviceSample):
            extras.samples.append(message)
        elif isinstance(message, MemoryBreakdown):
            extras.memory = message
        elif isinstance(message, Heartbeat):
            extras.heartbeat = message

    def _flush(self) -> None:
        if self._snapshot is not None or self._frames:
            self._pending.put(coalesce(self._frames, snapshot=self._snapshot))
            self._snapshot, self._frames = None, []
        if not self._extras.is_empty:
            self._pending.put(self._extras.update())
            self._extras = Extras()

"""Bounded queue of locally created messages. Coalesces them to updates for a reader, and passes them to a sink.

The sources of external engines use it in place of the sockets and queue of a live source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Heartbeat,
    MemoryBreakdown,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.mirror.coalesce import PendingUpdates, coalesce
from kvscope_telemetry.mirror.extras import Extras
from kvscope_telemetry.source import Update
from kvscope_telemetry.sources.sink import Sink, SinkFeed


class UpdateQueue:
    """Passes messages to a sink and coalesces them to updates. `enqueue` must be called from one thread only;
    `poll_update` and `set_sink` are thread-safe.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._feed = SinkFeed(sink)
        self._pending = PendingUpdates()
        self._snapshot: Snapshot | None = None
        self._frames: list[Frame] = []
        self._extras = Extras()

    @property
    def num_discarded(self) -> int:
        """Number of frames discarded because they were not read in time."""
        return self._pending.num_frames_discarded

    def set_sink(self, sink: Sink | None) -> None:
        """Pass subsequent messages to `sink`, or to no sink if None."""
        self._feed.set(sink)

    def wants_snapshot(self, now_ns: int) -> bool:
        """Return whether a snapshot is needed: pending frames were dropped, or a new sink has not received one."""
        self._feed.begin_pass()
        return self._pending.pop_overflow() or self._feed.wants_snapshot(now_ns)

    def begin_pass(self) -> None:
        """Begin to use the sink that was passed to `set_sink`. `wants_snapshot` does the same."""
        self._feed.begin_pass()

    def enqueue_past(self, messages: Sequence[TelemetryMessage]) -> None:
        """Pass on messages of a time before the source was opened, all at once.

        Updates contain only those since the last snapshot among them, merged to one update: its newest time is the
        present. The sink receives all messages.
        """
        snapshots = [index for index, message in enumerate(messages) if isinstance(message, Snapshot)]
        last = snapshots[-1] if snapshots else 0
        for message in messages[:last]:
            self._feed_message(message)
        self.enqueue(messages[last:])

    def enqueue(self, messages: Iterable[TelemetryMessage]) -> None:
        for message in messages:
            self._feed_message(message)
            if isinstance(message, Snapshot):
                self._flush()
                self._snapshot = message
            elif isinstance(message, Frame):
                self._frames.append(message)
            else:
                self._enqueue(message)
        self._flush()

    def poll_update(self) -> Update | None:
        """Return and clear the update with all messages since the last call; None if there are none."""
        return self._pending.poll_update()

    def discard(self) -> None:
        """Drop pending messages. Updates continue with the next snapshot."""
        self._pending.discard()

    def _feed_message(self, message: TelemetryMessage) -> None:
        if isinstance(message, Snapshot | Frame):
            self._feed.add_accepted(message, None)
        else:
            self._feed.add_other(message, None)

    def _enqueue(self, message: TelemetryMessage) -> None:
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

"""Passes everything that a live source accepts to a sink that records it, so that the recording is valid.

Owns the sink, and knows whether the sink has a state to which the next frame applies. A sink first receives a snapshot,
and another one after each gap. If the mirror does not need a snapshot at that time, one is requested for the sink
alone, and the frames that arrived in the meantime are passed on after it. A recording can thus start at any time
without affecting the mirror.

When a sink is replaced, the previous one first receives the frames that are included in the new one's snapshot. There
is thus no gap if the new sink forwards its messages to the previous one. All methods except `set` must be called on the
reading thread. Must not depend on sockets or on what sinks do.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final, Protocol

from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.state_continuity import StatePosition

MIN_PAUSE_NS: Final = 1_000_000_000
MAX_PAUSE_NS: Final = 30_000_000_000
"""Maximum wait after a gap before a snapshot is requested. The wait starts at `MIN_PAUSE_NS` and doubles with
each gap, so that a sink that keeps failing costs the engine little.
"""
MAX_HELD_BYTES: Final = 64 << 20
"""Maximum size of the frames that are buffered until a requested snapshot arrives."""


class Sink(Protocol):
    """Receives messages to be recorded, in order. Never blocks, never raises."""

    @property
    def failure(self) -> str:
        """Error message for users if the sink accepts no more messages; otherwise empty."""

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """Record `message`. `data` is its encoded form, if known. Returns False if the message is lost."""


class SinkFeed:
    """Passes the messages given to `add_accepted`, `snapshot` and `add_other` to a sink."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._wanted = sink
        self._sink: Sink | None = None
        self._place = StatePosition()
        self._is_lost = True
        self._before: tuple[Sink, StatePosition] | None = None
        """The previous sink and its position, until the current sink has received its snapshot."""
        self._pending_snapshot: tuple[Snapshot, bytes | None] | None = None
        """A snapshot that is newer than the received frames, held because the previous sink still needs these
        frames.
        """
        self._held: deque[tuple[Frame, bytes | None]] = deque()
        self._num_held_bytes = 0
        self._newest: tuple[int | None, int] = (None, 0)  # epoch and number of the last message passed on
        self._pause_ns = MIN_PAUSE_NS
        self._ask_ns = 0
        self._started_ns = 0

    def set(self, sink: Sink | None) -> None:
        """Pass messages to `sink` from the next pass on; None stops passing messages. Thread-safe."""
        self._wanted = sink

    def begin_pass(self) -> None:
        """Switch to the sink that was passed to `set`."""
        if self._wanted is not self._sink:
            if self._wanted is None:
                self._before = None
            elif self._sink is not None and not self._is_lost:
                self._before = self._sink, self._place
            self._sink, self._place, self._is_lost = self._wanted, StatePosition(), True
            self._pause_ns, self._ask_ns = MIN_PAUSE_NS, 0
            self._discard_buffer()

    @property
    def is_on(self) -> bool:
        """Whether there is a sink and it accepts messages."""
        return self._sink is not None and not self._sink.failure

    def wants_snapshot(self, now_ns: int) -> bool:
        return self._is_lost and self._pending_snapshot is None and self.is_on and now_ns >= self._ask_ns

    def add_accepted(self, message: Frame | Snapshot, data: bytes | None) -> None:
        """Pass on a frame or snapshot that the mirror will apply."""
        if isinstance(message, Snapshot):
            self._newest = (message.hello.epoch, message.seq)
            if self.is_on:
                self._begin(message, data)
            return
        self._newest = (message.epoch, message.seq)
        if not self.is_on:
            return
        if self._is_lost:
            self._buffer(message, data)
            pending, self._pending_snapshot = self._pending_snapshot, None
            if pending is not None:
                self.snapshot(*pending)
        else:
            self._write(message, data)

    def snapshot(self, snapshot: Snapshot, data: bytes | None) -> None:
        """Use a snapshot that was requested for the sink; the mirror does not need it."""
        if self._is_lost and self.is_on and self._follows_on(snapshot):
            if self._before is not None and self._newest[1] < snapshot.seq:
                self._pending_snapshot = snapshot, data
                return
            held = list(self._held)
            self._end_before(snapshot)
            self._begin(snapshot, data)
            for frame, its_data in held:
                self._write(frame, its_data)

    def add_other(self, message: TelemetryMessage, data: bytes | None) -> None:
        """Pass on a message other than a frame or snapshot, unless the sink lacks the state that the message
        refers to.
        """
        is_early = self._is_lost and self._newest[0] is not None
        if self._sink is not None and self.is_on and not is_early:
            self._sink.write(message, data)

    def _begin(self, snapshot: Snapshot, data: bytes | None) -> None:
        assert self._sink is not None, "no sink for the snapshot"
        self._discard_buffer()
        self._before = None
        if self._sink.write(snapshot, data):
            self._place.move_to(snapshot)
            self._is_lost, self._started_ns = False, time.monotonic_ns()
        else:
            self._lose()

    def _end_before(self, snapshot: Snapshot) -> None:
        """Pass the buffered frames up to `snapshot`, with which the new sink begins, to the previous sink."""
        if self._before is None:
            return
        sink, place = self._before
        for frame, data in self._held:
            if frame.seq > snapshot.seq or not place.is_before(frame) or sink.failure or not sink.write(frame, data):
                return
            place.advance(frame)

    def _write(self, frame: Frame, data: bytes | None) -> None:
        """Pass a frame to the sink if the frame directly follows the sink's position. Frames that the sink's
        snapshot already includes are skipped.
        """
        if self._is_lost or self._sink is None or not self._place.is_before(frame):
            return
        if self._sink.write(frame, data):
            self._place.advance(frame)
        else:
            self._lose()

    def _follows_on(self, snapshot: Snapshot) -> bool:
        """Return whether no frame is missing between `snapshot` and the buffered or future frames."""
        epoch, seq = self._newest
        first = self._held[0][0].seq if self._held else seq + 1
        return snapshot.hello.epoch == epoch and first <= snapshot.seq + 1

    def _lose(self) -> None:
        now_ns = time.monotonic_ns()
        lasted_long = now_ns - self._started_ns > MAX_PAUSE_NS
        self._pause_ns = MIN_PAUSE_NS if lasted_long else min(2 * self._pause_ns, MAX_PAUSE_NS)
        self._is_lost, self._ask_ns = True, now_ns + self._pause_ns
        self._discard_buffer()

    def _buffer(self, frame: Frame, data: bytes | None) -> None:
        self._held.append((frame, data))
        self._num_held_bytes += _num_bytes(frame, data)
        while self._num_held_bytes > MAX_HELD_BYTES and self._held:
            self._num_held_bytes -= _num_bytes(*self._held.popleft())

    def _discard_buffer(self) -> None:
        self._pending_snapshot = None
        self._held.clear()
        self._num_held_bytes = 0


def _num_bytes(frame: Frame, data: bytes | None) -> int:
    return approximate_bytes(frame) if data is None else len(data)

"""The sink that is given everything a live source accepts, in order to record it; and what makes that a valid
recording.

Owns the sink and whether it has a state that frames can follow. It is given a snapshot first, and one after each hole:
one that came for the mirror, or where the mirror needs none, one that is asked for on its behalf, with the frames that
were passed on meanwhile after it. So a recording may begin at any time, without the mirror noticing. The sink before
gets those that the snapshot has already: one that the new sink gives on to has no hole. Belongs to the reading thread,
but for `set`. Knows no sockets, and nothing of what becomes of what it gives.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final, Protocol

from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.state.continuity import StatePlace

MIN_PAUSE_NS: Final = 1_000_000_000
MAX_PAUSE_NS: Final = 30_000_000_000
"""How long after a hole a snapshot is asked for: a sink that loses it again and again costs the engine little."""
MAX_HELD_BYTES: Final = 64 << 20
"""Frames that wait for that snapshot."""


class Sink(Protocol):
    """Takes what is recorded, in order. Never blocks, never raises."""

    @property
    def failure(self) -> str:
        """Why nothing is taken any more, for a person; empty while all is well."""

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """Take `message` and the bytes it came as, where they are known. False: it is lost."""


class SinkFeed:
    """Gives a sink what `passed` and `other` are told of."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._wanted = sink
        self._sink: Sink | None = None
        self._place = StatePlace()
        self._is_lost = True
        self._before: tuple[Sink, StatePlace] | None = None
        """The sink before, which followed, until this one has its snapshot."""
        self._early: tuple[Snapshot, bytes | None] | None = None
        """One that is later than the frames that came: they are on their way, and the sink before wants them."""
        self._held: deque[tuple[Frame, bytes | None]] = deque()
        self._num_held_bytes = 0
        self._newest: tuple[int | None, int] = (None, 0)  # epoch and number of what was passed on last
        self._pause_ns = MIN_PAUSE_NS
        self._ask_ns = 0
        self._begun_ns = 0

    def set(self, sink: Sink | None) -> None:
        """From the next pass on give to `sink`, to nobody when None. Any thread."""
        self._wanted = sink

    def begin_pass(self) -> None:
        """Turn to the sink that is wanted now."""
        if self._wanted is not self._sink:
            if self._wanted is None:
                self._before = None
            elif self._sink is not None and not self._is_lost:
                self._before = self._sink, self._place
            self._sink, self._place, self._is_lost = self._wanted, StatePlace(), True
            self._pause_ns, self._ask_ns = MIN_PAUSE_NS, 0
            self._let_go()

    @property
    def is_on(self) -> bool:
        """Whether somebody is given anything."""
        return self._sink is not None and not self._sink.failure

    def wants_snapshot(self, now_ns: int) -> bool:
        """Whether one has to be asked for."""
        return self._is_lost and self._early is None and self.is_on and now_ns >= self._ask_ns

    def passed(self, message: Frame | Snapshot, data: bytes | None) -> None:
        """The mirror follows `message`."""
        if isinstance(message, Snapshot):
            self._newest = (message.hello.epoch, message.seq)
            if self.is_on:
                self._begin(message, data)
            return
        self._newest = (message.epoch, message.seq)
        if not self.is_on:
            return
        if self._is_lost:
            self._hold(message, data)
            early, self._early = self._early, None
            if early is not None:
                self.snapshot(*early)
        else:
            self._give(message, data)

    def snapshot(self, snapshot: Snapshot, data: bytes | None) -> None:
        """An answer came that the mirror has no need of."""
        if self._is_lost and self.is_on and self._follows_on(snapshot):
            if self._before is not None and self._newest[1] < snapshot.seq:
                self._early = snapshot, data
                return
            held = list(self._held)
            self._end_before(snapshot)
            self._begin(snapshot, data)
            for frame, its_data in held:
                self._give(frame, its_data)

    def other(self, message: TelemetryMessage, data: bytes | None) -> None:
        """What came beside frames, of the engine that is followed or of none; not before the state it goes with."""
        is_early = self._is_lost and self._newest[0] is not None
        if self._sink is not None and self.is_on and not is_early:
            self._sink.write(message, data)

    def _begin(self, snapshot: Snapshot, data: bytes | None) -> None:
        assert self._sink is not None, "nobody to give a snapshot to"
        self._let_go()
        self._before = None
        if self._sink.write(snapshot, data):
            self._place.go_to(snapshot)
            self._is_lost, self._begun_ns = False, time.monotonic_ns()
        else:
            self._lose()

    def _end_before(self, snapshot: Snapshot) -> None:
        """The sink before gets what is held up to the place of `snapshot`, which the new one begins with."""
        if self._before is None:
            return
        sink, place = self._before
        for frame, data in self._held:
            if frame.seq > snapshot.seq or not place.is_before(frame) or sink.failure or not sink.write(frame, data):
                return
            place.advance(frame)

    def _give(self, frame: Frame, data: bytes | None) -> None:
        """The next frame, or one that the snapshot has already."""
        if self._is_lost or self._sink is None or not self._place.is_before(frame):
            return
        if self._sink.write(frame, data):
            self._place.advance(frame)
        else:
            self._lose()

    def _follows_on(self, snapshot: Snapshot) -> bool:
        """Whether no frame is missing between `snapshot` and what is held, or will come."""
        epoch, seq = self._newest
        first = self._held[0][0].seq if self._held else seq + 1
        return snapshot.hello.epoch == epoch and first <= snapshot.seq + 1

    def _lose(self) -> None:
        now_ns = time.monotonic_ns()
        lasted_long = now_ns - self._begun_ns > MAX_PAUSE_NS
        self._pause_ns = MIN_PAUSE_NS if lasted_long else min(2 * self._pause_ns, MAX_PAUSE_NS)
        self._is_lost, self._ask_ns = True, now_ns + self._pause_ns
        self._let_go()

    def _hold(self, frame: Frame, data: bytes | None) -> None:
        self._held.append((frame, data))
        self._num_held_bytes += _num_bytes(frame, data)
        while self._num_held_bytes > MAX_HELD_BYTES and self._held:
            self._num_held_bytes -= _num_bytes(*self._held.popleft())

    def _let_go(self) -> None:
        self._early = None
        self._held.clear()
        self._num_held_bytes = 0


def _num_bytes(frame: Frame, data: bytes | None) -> int:
    return approximate_bytes(frame) if data is None else len(data)

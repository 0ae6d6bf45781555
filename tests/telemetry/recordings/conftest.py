"""Rings written by a simulated engine with its own clock, and the states that the engine had."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import DeviceSample, Frame, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.writer import LogClock

STEP_NS = 20_000_000


class RecordedSession:
    """An engine that steps every 20 ms of its own time and is written to a ring; keeps all messages."""

    def __init__(self, ring: Ring, *, num_blocks: int = 300, epoch: int = 1) -> None:
        self.ring = ring
        self.messages: list[TelemetryMessage] = []
        self.times_ns: list[int] = []
        self._states: list[tuple[int, Snapshot]] = []  # after so many messages
        self._log_clock = LogClock()
        self._now_ns = 1_000_000_000
        self._num_blocks = num_blocks
        self.restart(epoch)

    def restart(self, epoch: int, wall_ahead_ns: int = 0) -> None:
        """Replace the engine by another one whose wall clock is ahead."""
        self.engine = SimulatedEngine(
            num_blocks=self._num_blocks, num_running=6, epoch=epoch, seed=epoch, clock=self.tick
        )
        snapshot = self.engine.snapshot()
        hello = replace(snapshot.hello, wall_time_ns=snapshot.hello.wall_time_ns + wall_ahead_ns)
        self.write(snapshot := replace(snapshot, hello=hello))
        self._states.append((len(self.messages), snapshot))

    def write(self, message: TelemetryMessage) -> None:
        self.times_ns.append(self._log_clock.log_time_ns(message))
        self.messages.append(message)
        assert self.ring.write(message, wait=True)

    def advance(self, num_frames: int) -> None:
        """Write frames, and a device sample and a memory breakdown per second."""
        for _ in range(num_frames):
            self.write(frame := self.engine.advance())
            if frame.seq % 30 == 0:
                self._states.append((len(self.messages), replace(self.engine.snapshot(), time_ns=frame.time_ns)))
            if frame.seq % 50 == 0:
                self.write(DeviceSample(epoch=frame.epoch, time_ns=frame.time_ns, utilization=0.5))
                self.write(MemoryBreakdown(epoch=frame.epoch, time_ns=frame.time_ns, weights_bytes=frame.seq))

    def mirror_at(self, at_ns: int) -> Mirror:
        """Return the state after all messages up to `at_ns`."""
        count = bisect.bisect_right(self.times_ns, at_ns)
        begin, state = max((each for each in self._states if each[0] <= count), key=lambda each: each[0])
        follower = Follower()
        for message in [state, *self.messages[begin:count]]:
            follower.feed(message)
        follower.apply_pending()
        return follower.mirror

    @property
    def frames(self) -> list[Frame]:
        return [message for message in self.messages if isinstance(message, Frame)]

    def pass_time(self, duration_ns: int) -> None:
        """Advance the clock without any message."""
        self._now_ns += duration_ns

    def tick(self) -> int:
        self._now_ns += STEP_NS
        return self._now_ns


@pytest.fixture
def make_ring(tmp_path: Path) -> Callable[..., Ring]:
    """Function that makes a ring with a keyframe per second and segments of three, closed after the test:
    `make_ring(**options)`.
    """

    def make(name: str = "ring", **options: float) -> Ring:
        given = {"segment_seconds": 3.0, "keyframe_interval_ns": 1_000_000_000, **options}
        return Ring(tmp_path / name, **given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_session() -> Callable[..., RecordedSession]:
    """The class `RecordedSession`."""
    return RecordedSession


@pytest.fixture
def assert_same_state() -> Callable[[Mirror, Mirror], None]:
    """Function that compares two mirrors column by column, except for ended requests, which a keyframe does not
    contain.
    """

    def check(left: Mirror, right: Mirror) -> None:
        assert (left.epoch, left.seq, left.step, left.time_ns) == (right.epoch, right.seq, right.step, right.time_ns)
        assert left.ledger.differences(right.ledger) == []
        assert left.counters == right.counters
        columns = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
        for requests in (left.requests, right.requests):
            requests._select_rows((requests.state != RequestState.FINISHED).nonzero()[0])
        assert equal_requests(left.requests, right.requests, columns)

    return check

"""Recordings of a synthetic engine on a clock of its own, with the messages that went in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.synthetic.engine import SyntheticEngine

STEP_NS = 20_000_000


class SteppedClock:
    """A frame every 20 ms."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        self.now_ns += STEP_NS
        return self.now_ns


@dataclass(frozen=True, slots=True)
class Recorded:
    """A file and what is in it."""

    path: Path
    messages: list[TelemetryMessage]

    @property
    def frames(self) -> list[Frame]:
        return [message for message in self.messages if isinstance(message, Frame)]

    def mirror_after(self, num_messages: int) -> Mirror:
        follower = Follower()
        for message in self.messages[:num_messages]:
            follower.feed(message)
        follower.settle()
        return follower.mirror


def synthetic_messages(
    num_frames: int, *, num_blocks: int = 400, epoch: int = 1, seed: int = 0
) -> list[TelemetryMessage]:
    """Hello, snapshot and frames."""
    clock = SteppedClock()
    engine = SyntheticEngine(num_blocks=num_blocks, num_running=8, epoch=epoch, seed=seed, clock=clock)
    return [engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recorded]:
    """`record(num_frames or messages)`: a whole recording with a keyframe a second."""

    def make(what: int | list[TelemetryMessage] = 300, name: str = "session.mcap", **options: int) -> Recorded:
        messages = synthetic_messages(what) if isinstance(what, int) else what
        with RecordingWriter(tmp_path / name, **{"keyframe_interval_ns": 1_000_000_000, **options}) as writer:
            for message in messages:
                writer.write(message, wait=True)
        assert writer.num_dropped == 0
        return Recorded(writer.path, messages)

    return make


@pytest.fixture
def make_messages() -> Callable[..., list[TelemetryMessage]]:
    """`synthetic_messages`."""
    return synthetic_messages


@pytest.fixture
def assert_same_state() -> Callable[[Mirror, Mirror], None]:
    """Everything but the requests that ended: a keyframe does not have them."""

    def check(left: Mirror, right: Mirror) -> None:
        assert (left.epoch, left.seq, left.step, left.time_ns) == (right.epoch, right.seq, right.step, right.time_ns)
        assert left.ledger.differences(right.ledger) == []
        assert left.counters == right.counters
        columns = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
        assert equal_requests(_going_on(left), _going_on(right), columns)

    return check


def _going_on(mirror: Mirror):  # type: ignore[no-untyped-def]
    requests = mirror.requests
    requests._keep((requests.state != RequestState.FINISHED).nonzero()[0])
    return requests

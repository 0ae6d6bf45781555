"""Fixtures: two recordings of simulated engines with different pools and lengths, and pairs of sessions on them."""

from __future__ import annotations

import time

import msgspec
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.compare.session_pair import SessionPair
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAIT_S = 60.0
BEGAN_NS = 1_700_000_000_000_000_000
"""Wall-clock time at which the first recording begins."""


class SteppedClock:
    """Clock that advances by 10 ms with each call."""

    def __init__(self, now_ns=1_000_000_000):
        self.now_ns = now_ns

    def __call__(self):
        self.now_ns += 10_000_000
        return self.now_ns


def write_recording(path, num_frames, num_blocks, seed=0, start_ns=1_000_000_000, wall_ns=BEGAN_NS):
    """Record some seconds of a simulated engine that began at `wall_ns`. Returns the path."""
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=6, epoch=9, seed=seed, clock=SteppedClock(start_ns))
    engine.hello = msgspec.structs.replace(engine.hello, wall_time_ns=wall_ns)
    with RecordingWriter(path, keyframe_interval_ns=1_000_000_000) as writer:
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))):
            writer.write(message, wait=True)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Paths of two recordings.

    The second is shorter, has another pool, and begins 2 s later by its engine clock and 0.3 s by wall time.
    """
    folder = tmp_path_factory.mktemp("recordings")
    a = write_recording(folder / "paged.mcap", 700, 120)
    return a, write_recording(
        folder / "other.mcap", 350, 300, seed=3, start_ns=3_000_000_000, wall_ns=BEGAN_NS + 300_000_000
    )


@pytest.fixture
def make_pair(paths, qapp):
    """Function that returns a pair of sessions paused at their starts; they are closed afterwards."""
    made = []

    def make(a=paths[0], b=paths[1]):
        sessions = [Session(PlaybackSource(Recording.open(path), is_playing=False)) for path in (a, b)]
        pair = SessionPair(*sessions)
        made.append(pair)
        wait_until_settled(pair)
        return pair

    yield make
    for pair in made:
        pair.pause()
        for session in (pair.a, pair.b):
            session.close()
            session.deleteLater()
        pair.deleteLater()


def wait_until_settled(pair):
    """Wait until the states at both cursors are applied and both overviews are read."""
    deadline_s = time.monotonic() + WAIT_S
    for session in (pair.a, pair.b):
        while not session.is_overview_complete:
            assert time.monotonic() < deadline_s
            session.extend_overview()
        assert session.source.wait(lambda session=session: not session.source.is_seeking, WAIT_S)
        session.poll()

"""Two recordings of simulated engines, of other pools and lengths, and sessions on them."""

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
"""When A began, by the wall clock."""


class SteppedClock:
    """Goes on by 10 ms whenever it is read."""

    def __init__(self, now_ns=1_000_000_000):
        self.now_ns = now_ns

    def __call__(self):
        self.now_ns += 10_000_000
        return self.now_ns


def record(path, num_frames, num_blocks, seed=0, start_ns=1_000_000_000, wall_ns=BEGAN_NS):
    """Some seconds of a simulated engine that began at `wall_ns`, however long it takes to make them."""
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=6, epoch=9, seed=seed, clock=SteppedClock(start_ns))
    engine.hello = msgspec.structs.replace(engine.hello, wall_time_ns=wall_ns)
    with RecordingWriter(path, keyframe_interval_ns=1_000_000_000) as writer:
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))):
            writer.write(message, wait=True)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A is longer; B has another pool, and begins 2 s later by its own clock, 0.3 s by the wall's."""
    folder = tmp_path_factory.mktemp("recordings")
    a = record(folder / "paged.mcap", 700, 120)
    return a, record(folder / "other.mcap", 350, 300, seed=3, start_ns=3_000_000_000, wall_ns=BEGAN_NS + 300_000_000)


@pytest.fixture
def make_pair(paths, qapp):
    """Pairs of sessions that stand at their starts; closed at the end."""
    made = []

    def make(a=paths[0], b=paths[1]):
        sessions = [Session(PlaybackSource(Recording.open(path), is_playing=False)) for path in (a, b)]
        pair = SessionPair(*sessions)
        made.append(pair)
        settle(pair)
        return pair

    yield make
    for pair in made:
        pair.pause()
        for session in (pair.a, pair.b):
            session.close()
            session.deleteLater()
        pair.deleteLater()


def settle(pair):
    """Both have taken all there is where they are, and their overviews are read."""
    deadline_s = time.monotonic() + WAIT_S
    for session in (pair.a, pair.b):
        while not session.is_overview_complete:
            assert time.monotonic() < deadline_s
            session.extend_overview()
        assert session.source.wait(lambda session=session: not session.source.is_seeking, WAIT_S)
        session.poll()

"""Windows on a real ring and real sockets, and on recordings, for what is done with bookmarks and alarms."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer
from tests.telemetry.alarms.receiver import open_receiver

from kvscope_app.session.recording.kept_timeline import KeptTimeline
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 120_000


@pytest.fixture
def window(make_window, settings, tmp_path, qtbot):
    """On a simulated engine, with two seconds kept; its docks' views are loaded."""
    endpoint = f"ipc://{tmp_path}/telemetry"
    with closing(SimulatedServer(SimulatedEngine(num_blocks=100, num_running=6), endpoint, rate=25.0)):
        source = LiveSource(endpoint)
        session = Session(source)
        session.keep(KeptTimeline(make_ring(settings), source.set_sink))
        made = make_window(session, with_views=("timeline", "bookmarks"))
        session.start()
        qtbot.waitUntil(lambda: len(session.overview) >= 2 and session.timeline.range_ns is not None, timeout=WAIT_MS)
        yield made
        made.close()
        session.close()
        session.deleteLater()


@pytest.fixture
def play(make_window, qtbot):
    """Windows on recordings, once their overview was read."""
    sessions = []

    def open_window(path, with_views=False):
        session = Session(PlaybackSource(Recording.open(path), is_playing=False))
        sessions.append(session)
        made = make_window(session, with_views=with_views)
        session.start()
        qtbot.waitUntil(lambda: session.is_overview_whole and len(session.overview) > 0, timeout=WAIT_MS)
        return made

    yield open_window
    for session in sessions:
        session.close()
        session.deleteLater()


@pytest.fixture
def receiver():
    """A server for webhooks."""
    with open_receiver() as made:
        yield made


@pytest.fixture
def arrive(qtbot):
    """Wait until what is shown is where the cursor is."""

    def wait(session):
        qtbot.waitUntil(
            lambda: (
                session.timeline.player is not None
                and session.timeline.cursor.point.has_state
                and not session.timeline.cursor.is_seeking
                and not session.timeline.cursor._source._spans  # and what it found is applied
            ),
            timeout=WAIT_MS,
        )

    return wait

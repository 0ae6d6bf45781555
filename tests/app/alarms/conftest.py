"""Fixtures: windows on a live simulated engine or on recordings, and a webhook server."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer
from tests.telemetry.alarms.receiver import open_receiver

from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 120_000


@pytest.fixture
def window(make_window, settings, tmp_path, qtbot):
    """Main window on a simulated engine, once at least two seconds are recorded and its timeline and bookmarks are
    loaded.
    """
    endpoint = f"ipc://{tmp_path}/telemetry"
    with closing(SimulatedServer(SimulatedEngine(num_blocks=100, num_running=6), endpoint, rate=25.0)):
        source = LiveSource(endpoint)
        session = Session(source)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        made = make_window(session, with_views=("timeline", "bookmarks"))
        session.start()
        qtbot.waitUntil(lambda: len(session.overview) >= 2 and session.timeline.range_ns is not None, timeout=WAIT_MS)
        yield made
        made.close()
        session.close()
        session.deleteLater()


@pytest.fixture
def open_playback_window(make_window, qtbot):
    """Return a function that opens a paused window on a recording and waits until its overview is read."""
    sessions = []

    def open_window(path, with_views=False):
        session = Session(PlaybackSource(Recording.open(path), is_playing=False))
        sessions.append(session)
        made = make_window(session, with_views=with_views)
        session.start()
        qtbot.waitUntil(lambda: session.is_overview_complete and len(session.overview) > 0, timeout=WAIT_MS)
        return made

    yield open_window
    for session in sessions:
        session.close()
        session.deleteLater()


@pytest.fixture
def webhook_server():
    """HTTP server that records the posts of webhooks."""
    with open_receiver() as made:
        yield made


@pytest.fixture
def wait_for_seek(qtbot):
    """Return a function that waits until the state shown is that of the cursor."""

    def wait(session):
        qtbot.waitUntil(
            lambda: (
                session.timeline.player is not None
                and session.timeline.cursor.viewpoint.has_state
                and not session.timeline.cursor.is_seeking
                and not session.timeline.cursor._playback._spans  # and the updates found there are applied
            ),
            timeout=WAIT_MS,
        )

    return wait

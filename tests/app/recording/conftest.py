"""Fixture: a window with a recorded history."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.recording.text_recorder import set_text_consent
from kvscope_app.session.session import Session
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 120_000


@pytest.fixture
def window(make_window, settings, tmp_path, qtbot):
    """Main window on a simulated engine, once at least two seconds are recorded."""
    set_text_consent(settings, False)
    endpoint = f"ipc://{tmp_path}/telemetry"
    with closing(SimulatedServer(SimulatedEngine(num_blocks=200, num_running=6), endpoint, rate=25.0)):
        source = LiveSource(endpoint)
        session = Session(source)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        made = make_window(session)
        session.start()
        qtbot.waitUntil(lambda: len(session.overview) >= 2, timeout=WAIT_MS)
        yield made
        made.close()
        session.close()
        session.deleteLater()

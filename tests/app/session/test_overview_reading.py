"""Test of the overview of a recording when part of it cannot be read."""

from __future__ import annotations

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.session import overview_reader
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAIT_MS = 60_000


@pytest.fixture
def path(tmp_path):
    engine = SimulatedEngine(num_blocks=40, num_running=2)
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(20))):
            writer.write(message, wait=True)
    return writer.path


def test_unreadable_overview_is_reported_once_and_does_not_block(path, qtbot, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(overview_reader, "missing_from", lambda *_: 0)
    monkeypatch.setattr(overview_reader, "computed_parts", broken)
    session, received = Session(PlaybackSource(Recording.open(path), is_playing=False)), []
    session.noticed.connect(received.append)
    session.start()
    qtbot.waitUntil(lambda: session.is_overview_complete and session.mirror.hello is not None, timeout=WAIT_MS)
    assert session.overview_share is None
    assert received == ["Not all of its overview can be read: Input/output error"]
    session.close()
    session.deleteLater()

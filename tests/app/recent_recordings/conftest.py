"""Fixture: small recordings."""

from __future__ import annotations

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.recordings.writer import RecordingWriter


@pytest.fixture
def write_recording(tmp_path):
    """Return a function that writes a recording of a few frames and returns its path."""

    def make(name, epoch=7, num_frames=40):
        path = tmp_path / name
        engine = SimulatedEngine(num_blocks=60, num_running=4, epoch=epoch)
        with RecordingWriter(path) as writer:
            for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))):
                writer.write(message, wait=True)
        return path

    return make

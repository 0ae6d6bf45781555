"""Small recordings to list."""

from __future__ import annotations

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.recordings.writer import RecordingWriter


@pytest.fixture
def record(tmp_path):
    """Writes a recording of a few frames: `record(name, epoch=…)` gives its path."""

    def make(name, epoch=7, num_frames=40):
        path = tmp_path / name
        engine = SimulatedEngine(num_blocks=60, num_running=4, epoch=epoch)
        with RecordingWriter(path) as writer:
            for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))):
                writer.write(message, wait=True)
        return path

    return make

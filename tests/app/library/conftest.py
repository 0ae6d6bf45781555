"""A library in a folder of the test's own, and small recordings to list."""

from __future__ import annotations

import pytest

from kvscope_app.library.library import Library
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.synthetic.engine import SyntheticEngine


@pytest.fixture
def record(tmp_path):
    """Writes a recording of a few frames: `record(name, epoch=…)` gives its path."""

    def make(name, epoch=7, num_frames=40):
        path = tmp_path / name
        engine = SyntheticEngine(num_blocks=60, num_running=4, epoch=epoch)
        with RecordingWriter(path) as writer:
            for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))):
                writer.write(message, wait=True)
        return path

    return make


@pytest.fixture
def library(qapp, tmp_path):
    """Closed at the end."""
    made = Library(tmp_path / "library")
    yield made
    made.close()
    made.deleteLater()

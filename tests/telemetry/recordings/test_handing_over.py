"""When a recording is handed to the system: who is killed loses less than a second of it, from its first moment on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings import writer as writing
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

PATIENCE_S = 60.0


class HeldFile(McapFile):
    """Takes nothing until it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def add_message(self, *given: Any, **named: Any) -> None:
        self.is_held.set()
        self.may_go_on.wait(PATIENCE_S)
        super().add_message(*given, **named)


def test_what_came_with_a_state_is_handed_over_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_S", 10 * PATIENCE_S)
    engine = SimulatedEngine(num_blocks=300, num_running=8)
    file = HeldFile(tmp_path / "new.mcap")
    with RecordingWriter(file) as writer:
        writer.write(engine.heartbeat())
        assert file.is_held.wait(PATIENCE_S)
        for message in (engine.snapshot(), *(engine.advance() for _ in range(20))):  # they are taken together then
            writer.write(message)
        file.may_go_on.set()
        until_s = time.monotonic() + PATIENCE_S
        while _num_frames(writer.part) < 20:
            assert time.monotonic() < until_s, "they wait for more"
            time.sleep(0.01)


def _num_frames(part: Path) -> int:
    """Of what a process that is killed now would leave."""
    try:
        return Recording.open(part).info.num_frames
    except BadInput:
        return 0

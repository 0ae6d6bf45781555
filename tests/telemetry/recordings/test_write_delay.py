"""When recorded messages reach the operating system: a killed process loses less than a second of them."""

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
    """File that blocks until it may continue."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def add_message(self, *given: Any, **named: Any) -> None:
        self.is_held.set()
        self.may_go_on.wait(PATIENCE_S)
        super().add_message(*given, **named)


def test_messages_with_the_first_state_are_flushed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_S", 10 * PATIENCE_S)
    engine = SimulatedEngine(num_blocks=300, num_running=8)
    file = HeldFile(tmp_path / "new.mcap")
    with RecordingWriter(file) as writer:
        writer.write(engine.heartbeat())
        assert file.is_held.wait(PATIENCE_S)
        for message in (
            engine.snapshot(),
            *(engine.advance() for _ in range(20)),
        ):  # then the writer takes them together
            writer.write(message)
        file.may_go_on.set()
        until_s = time.monotonic() + PATIENCE_S
        while _num_frames(writer.part) < 20:
            assert time.monotonic() < until_s, "the frames were not flushed"
            time.sleep(0.01)


def _num_frames(part: Path) -> int:
    """Return the number of frames that would be left if the process were killed now."""
    try:
        return Recording.open(part).info.num_frames
    except BadInput:
        return 0

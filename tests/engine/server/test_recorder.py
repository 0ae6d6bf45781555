"""`serve --record`: what clients receive is also recorded, completely, with gaps repaired."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_engine.server.service import EngineService
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import BlockContent, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Heartbeat, Hello, Progress, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.engine_recorder import EngineRecorder
from kvscope_telemetry.recordings.reader import Recording

if TYPE_CHECKING:
    from conftest import Client


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(num_blocks=200, num_running=4)


def record_message(recorder: EngineRecorder, message: TelemetryMessage) -> None:
    recorder.record(message, encode(message))


def test_engine_recording_starts_with_a_snapshot_and_contains_every_frame(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with EngineRecorder(tmp_path / "x.mcap") as recorder:
        record_message(recorder, Progress(stage="load"))
        record_message(recorder, engine.hello)
        record_message(recorder, engine.advance())  # follows no known state
        assert recorder.wants_snapshot
        recorder.add_snapshot(engine.snapshot())
        assert not recorder.wants_snapshot
        frames = [engine.advance() for _ in range(5)]
        for frame in frames:
            record_message(recorder, frame)
        record_message(recorder, Goodbye(epoch=engine.hello.epoch))
    recording = Recording.open(tmp_path / "x.mcap")
    assert recording.info.is_complete
    messages = [message for _, message in recording.messages()]
    assert [type(message) for message in messages] == [Hello, Snapshot, *[Frame] * 5, Goodbye]
    assert messages[2:7] == frames


def test_missing_frame_in_an_engine_recording_is_repaired_by_a_new_snapshot(
    engine: SimulatedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope_telemetry.recordings.engine_recorder.MIN_REQUEST_DELAY_S", 0.0)
    with EngineRecorder(tmp_path / "x.mcap") as recorder:
        recorder.add_snapshot(engine.snapshot())
        record_message(recorder, engine.advance())
        engine.advance()  # dropped by the publisher
        record_message(recorder, engine.advance())
        assert recorder.wants_snapshot
        recorder.add_snapshot(engine.snapshot())
        record_message(recorder, engine.advance())
    recording = Recording.open(tmp_path / "x.mcap")
    assert recording.state_at(recording.info.duration_s).ledger.differences(engine.ledger) == []
    assert [frame.seq for frame in recording.frames()] == [1, 4]


def test_texts_are_requested_between_steps_and_written(
    engine: SimulatedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope_telemetry.block_texts.published_texts.REQUEST_INTERVAL_S", 0.0)
    with EngineRecorder(tmp_path / "x.mcap", texts=True) as recorder:
        recorder.add_snapshot(engine.snapshot())
        for _ in range(30):
            record_message(recorder, engine.advance())
            recorder.add_texts(BlockContent(block=block, token_ids=(1, 2), text="hi") for block in recorder.wants_texts)
    recording = Recording.open(tmp_path / "x.mcap")
    assert recording.has_texts
    assert {text.text for text in recording.texts()} == {"hi"}


def test_texts_are_not_recorded_unless_requested(engine: SimulatedEngine, tmp_path: Path) -> None:
    with EngineRecorder(tmp_path / "x.mcap") as recorder:
        recorder.add_snapshot(engine.snapshot())
        record_message(recorder, engine.advance())
        assert recorder.wants_texts == ()
        recorder.add_texts([BlockContent(block=1, token_ids=(1,), text="secret")])
    assert not Recording.open(tmp_path / "x.mcap").has_texts
    assert b"secret" not in (tmp_path / "x.mcap").read_bytes()


def test_engine_recorder_writes_no_file_before_the_first_snapshot(tmp_path: Path) -> None:
    with EngineRecorder(tmp_path / "x.mcap") as recorder:
        record_message(recorder, Progress(stage="load"))
    assert list(tmp_path.iterdir()) == []


def test_recording_that_stops_early_is_reported_once(engine: SimulatedEngine, tmp_path: Path) -> None:
    received: list[str] = []
    recorder = EngineRecorder(tmp_path / "x.mcap", received.append)
    recorder.add_snapshot(engine.snapshot())
    record_message(recorder, engine.advance())
    recorder.writer._fail("No space left on device")  # as a full disk does
    for _ in range(3):
        record_message(recorder, engine.advance())
    recorder.close()
    assert received == [
        f"recording '{tmp_path / 'x.mcap'}' stopped early: No space left on device; the engine continues"
    ]
    assert not recorder.wants_snapshot


def test_service_records_every_frame(folder: Path, fake: ModuleType, client: Client, tmp_path: Path) -> None:
    with EngineRecorder(tmp_path / "x.mcap") as recorder:
        service = EngineService(f"ipc://{folder}", fake.builder(fake.FakeEngineOptions()), recorder=recorder)
        thread = threading.Thread(target=service.run)
        thread.start()
        client.wait_ready()
        client.telemetry(Heartbeat)
        client.run(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=30)))
        service.stop()
        thread.join(60)
    recording = Recording.open(tmp_path / "x.mcap")
    numbers = [frame.seq for frame in recording.frames()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) >= 30
    kinds = {type(message) for _, message in recording.messages()}
    assert {Snapshot, Frame, Heartbeat, Goodbye} <= kinds


def test_sigterm_completes_the_recording(
    serving: Callable[..., subprocess.Popen[str]], client: Client, tmp_path: Path
) -> None:
    process = serving(step_s=0.01, record=tmp_path / "x.mcap")
    client.wait_ready()
    client.telemetry(Heartbeat)
    client.run(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=5)))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert Recording.open(tmp_path / "x.mcap").info.is_complete


def test_unusable_path_is_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "x.mcap").write_text("mine")
    with pytest.raises(BadInput, match="already exists"):
        EngineRecorder(tmp_path / "x.mcap")

"""Tests of texts in recordings: recorded only with the user's consent, and shown again during playback."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from PySide6.QtWidgets import QFileDialog, QMessageBox
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.recording.recording_actions import record, save_last_seconds, stop_recording
from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.recorded_texts import recorded_texts
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.recording.text_recorder import TextRecorder, text_consent
from kvscope_app.session.session import Session
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 120_000


@pytest.fixture
def window(make_window, settings, tmp_path, qtbot):
    """Main window on a simulated engine, with the operator role."""
    endpoint = f"ipc://{tmp_path}/telemetry"
    with closing(SimulatedServer(SimulatedEngine(num_blocks=60, num_running=4), endpoint, rate=20.0)):
        source = LiveSource(endpoint)
        session = Session(source)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        made = make_window(session)
        session.start()
        qtbot.waitUntil(lambda: session.may_operate and session.timeline.range_ns is not None, timeout=WAIT_MS)
        yield made
        made.close()
        session.close()
        session.deleteLater()


def test_consent_to_record_texts_is_asked_once_and_remembered(window, settings, qtbot):
    assert text_consent(settings) is None
    assert not window.actions_by_name["record_texts"].isChecked()
    assert window.session.findChild(TextRecorder) is None
    window.actions_by_name["record"].trigger()
    box = window.findChild(QMessageBox)
    assert "prompt and answer text" in box.text()
    assert box.defaultButton().text() == "Without text"
    box.reject()
    assert text_consent(settings) is None
    assert window.findChild(QFileDialog) is None
    window.actions_by_name["record"].trigger()
    next(each for each in window.findChildren(QMessageBox) if each.isVisible()).defaultButton().click()
    qtbot.waitUntil(lambda: window.findChild(QFileDialog) is not None, timeout=WAIT_MS)
    window.findChild(QFileDialog).reject()
    assert text_consent(settings) is False
    window.actions_by_name["record"].trigger()
    assert not [box for box in window.findChildren(QMessageBox) if box.isVisible()]


def test_without_consent_no_texts_are_recorded(window, qtbot, tmp_path):
    record(window, str(tmp_path / "without.mcap"))
    qtbot.waitUntil(lambda: window.session.disk_history.recorder.writer.num_written > 5, timeout=WAIT_MS)
    stop_recording(window)
    qtbot.waitUntil(lambda: (tmp_path / "without.mcap").exists(), timeout=WAIT_MS)
    assert not Recording.open(tmp_path / "without.mcap").has_texts
    assert not window.session.disk_history.has_texts


def test_with_consent_recordings_and_saved_history_contain_texts(window, settings, qtbot, tmp_path):
    window.actions_by_name["record_texts"].trigger()
    assert text_consent(settings) is True
    record(window, str(tmp_path / "with.mcap"))
    keeping = window.session.findChild(TextRecorder)
    qtbot.waitUntil(lambda: keeping._recorder is not None and keeping._collector.num_confirmed > 0, timeout=WAIT_MS)
    stop_recording(window)
    save_last_seconds(window, 60.0, str(tmp_path / "kept.mcap"))
    for name in ("with.mcap", "kept.mcap"):
        qtbot.waitUntil(lambda name=name: (tmp_path / name).exists(), timeout=WAIT_MS)
        texts = list(Recording.open(tmp_path / name).texts())
        assert texts
        assert all(text.token_ids for text in texts)
    window.actions_by_name["record_texts"].trigger()
    assert text_consent(settings) is False
    assert not window.session.findChild(TextRecorder).is_on


@pytest.fixture
def playback_session(tmp_path, qtbot):
    """Session on a recording that contains the texts of all its full blocks."""
    from kvscope_telemetry.block_texts.published_texts import PublishedTexts
    from kvscope_telemetry.messages.commands import BlockContent

    engine = SimulatedEngine(num_blocks=60, num_running=4)
    with RecordingWriter(tmp_path / "texts.mcap") as writer:
        texts = PublishedTexts(writer.write_texts)
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(60))):
            writer.write(message, wait=True)
            if message is not engine.hello:
                texts.add_message(message)
                texts._next_request_s = -1.0
                texts.add_contents(
                    BlockContent(block=block, token_ids=(1,) * 16, text=f"words of block {block}")
                    for block in texts.due()
                )
        texts.write()
    session = Session(PlaybackSource(Recording.open(tmp_path / "texts.mcap")))
    session.start()
    qtbot.waitUntil(lambda: session.mirror.seq == 60, timeout=WAIT_MS)
    session.timeline.pause()
    yield session
    session.close()
    session.deleteLater()


def test_block_text_is_read_from_the_recording(playback_session, qtbot):
    texts = playback_session.texts
    ledger = playback_session.mirror.ledger
    full = np.flatnonzero((ledger.hash != 0) & (ledger.state == BlockState.ACTIVE))
    block = int(full[0])
    asked = block_facts(playback_session.mirror, block, 16).text_lookup
    texts.request("card", [asked])
    assert texts.get(asked) is None
    assert texts.is_pending(asked)
    qtbot.waitUntil(lambda: texts.get(asked) is not None, timeout=WAIT_MS)
    assert texts.get(asked).text == f"words of block {block}"


def test_recording_without_texts_has_no_text_source(tmp_path, qtbot):
    engine = SimulatedEngine(num_blocks=60, num_running=4)
    with RecordingWriter(tmp_path / "none.mcap") as writer:
        for message in (engine.hello, engine.snapshot(), engine.advance()):
            writer.write(message, wait=True)
    source = PlaybackSource(Recording.open(tmp_path / "none.mcap"))
    assert recorded_texts(source, None) is None
    source.close()

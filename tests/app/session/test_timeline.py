"""Tests of a live session's timeline with a real history process and sockets: pause, seek, step, play and go live."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from PySide6.QtCore import QSettings
from PySide6.QtTest import QTest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer
from tests.telemetry.conftest import assert_same_state

from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.rings import make_ring, rings_folder
from kvscope_app.session.session import Session
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.sources.live_source import LiveSource

__all__ = ["assert_same_state"]

WAIT_MS = 120_000
SECOND_NS = 1_000_000_000


@pytest.fixture
def settings(tmp_path):
    return QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)


def make_server(folder):
    engine = SimulatedEngine(num_blocks=200, num_running=6)
    return SimulatedServer(engine, f"ipc://{folder}/telemetry", rate=25.0)


@contextmanager
def session_with_history(folder):
    """Session on a simulated engine, with three seconds of recorded history."""
    with closing(make_server(folder)):
        source = LiveSource(f"ipc://{folder}/telemetry")
        session = Session(source)
        settings = QSettings(str(folder / "s.ini"), QSettings.Format.IniFormat)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        session.start()
        until = time.monotonic() + WAIT_MS / 1000
        while len(session.overview) < 3:
            assert time.monotonic() < until
            QTest.qWait(20)
        yield session
        session.close()
        session.deleteLater()


@pytest.fixture(scope="module")
def shared(qapp, tmp_path_factory):
    """Session shared by all tests that restore its state."""
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with session_with_history(folder) as session:
            yield session


@pytest.fixture
def live(shared, qtbot):
    """The shared session, live at its end."""
    assert shared.disk_history.ring.flush(60.0)  # flush, so that recent times can be read
    yield shared
    shared.timeline.go_live()
    shared.timeline.set_speed(1.0)
    assert shared.timeline.player is None


@pytest.fixture
def threads_before():
    """Threads that exist before the test, for example those of `shared`."""
    return set(threading.enumerate())


@pytest.fixture
def own_session(qapp, tmp_path, threads_before):
    """Session of a single test, which may close it."""
    with session_with_history(tmp_path) as session:
        assert session.disk_history.ring.flush(60.0)
        yield session


def early_ns(session):
    """Return a time several seconds before the end, or the start of the timeline."""
    first_ns, last_ns = session.timeline.range_ns
    return max(first_ns, last_ns - 3 * SECOND_NS)


def wait_for_seek(session, qtbot):
    """Wait until the state at the cursor is applied."""

    def there():
        cursor = session.timeline.cursor
        return (
            cursor.viewpoint is not None
            and cursor.viewpoint.has_state
            and not cursor.is_seeking
            and not cursor._playback._spans
        )

    qtbot.waitUntil(there, timeout=WAIT_MS)


def recorded_state_at(session, time_ns):
    ring_recording = Recording.open(session.disk_history.ring.folder, origin_ns=session.disk_history.ring.origin_ns)
    return ring_recording.state_at((time_ns - ring_recording.start_ns) / 1e9)


def test_timeline_of_a_live_session_covers_the_seconds_since_its_start(live):
    first_ns, last_ns = live.timeline.range_ns
    assert last_ns - first_ns >= 2 * SECOND_NS
    assert abs(live.timeline.cursor_ns - time.time_ns()) < SECOND_NS
    assert not live.timeline.is_paused
    assert live.timeline.is_playing
    assert float(live.overview.column("num_steps").sum()) > 0


def test_pause_freezes_the_shown_state_while_the_live_state_continues(live, qtbot):
    live.timeline.pause()
    seq, at_ns, newest = live.mirror.seq, live.timeline.cursor_ns, live.live_mirror.seq
    assert live.timeline.is_paused
    assert seq == newest
    assert live.timeline.player is None  # pausing opens no recording
    qtbot.waitUntil(lambda: live.live_mirror.seq > newest + 30, timeout=WAIT_MS)
    assert live.mirror.seq == seq
    assert live.timeline.cursor_ns == at_ns
    qtbot.waitUntil(lambda: live.timeline.behind_seconds > 0.2, timeout=WAIT_MS)


def test_seeking_back_shows_the_recorded_state_and_history(live, qtbot):
    target_ns = live.timeline.range_ns[0] + 2 * SECOND_NS
    live.timeline.go_to(target_ns)
    assert live.timeline.is_paused
    wait_for_seek(live, qtbot)
    assert abs(live.timeline.cursor_ns - target_ns) < 1000
    expected = recorded_state_at(live, target_ns)
    assert live.mirror.seq == expected.seq < live.live_mirror.seq
    assert live.mirror.ledger.differences(expected.ledger) == []
    window = live.history.window(600, live.timeline.shown_monotonic_ns)
    num_frames = expected.seq - recorded_state_at(live, live.timeline.range_ns[0]).seq
    a_second = float(live.overview.column("num_steps").max())  # steps within the second in progress are estimated
    assert np.nansum(window.columns["num_steps"]) == pytest.approx(num_frames, abs=1.5 * a_second + 5)
    assert live.timeline.end.history is not live.history


def test_recorded_states_equal_the_live_states(live, qtbot, assert_same_state):
    """Compares mirrors copied while live with those rebuilt from the recording.

    Requests that finished before the last keyframe are missing from the latter.
    """
    was = []
    for _ in range(6):
        seq = live.live_mirror.seq
        qtbot.waitUntil(lambda seq=seq: live.live_mirror.seq > seq + 5, timeout=WAIT_MS)
        live.timeline.pause()
        was.append(live.mirror)
        live.timeline.go_live()
    live.timeline.pause()
    live.timeline.go_to(early_ns(live))
    wait_for_seek(live, qtbot)
    for mirror in (*reversed(was), *was):
        live.timeline.player.step(mirror.seq - live.mirror.seq)
        wait_for_seek(live, qtbot)
        qtbot.waitUntil(lambda mirror=mirror: live.mirror.seq == mirror.seq, timeout=WAIT_MS)
        assert set(live.mirror.requests.number.tolist()) <= set(mirror.requests.number.tolist())
        assert_same_state(copy.deepcopy(live.mirror), copy.deepcopy(mirror))


def test_stepping_moves_by_the_given_number_of_frames(live, qtbot):
    live.timeline.go_to(early_ns(live) + 2 * SECOND_NS)
    wait_for_seek(live, qtbot)
    for num_frames in (1, 1, -1, -3, 5):
        seq = live.mirror.seq
        live.timeline.step_frames(num_frames)
        wait_for_seek(live, qtbot)
        assert live.mirror.seq == seq + num_frames
    assert not live.timeline.is_playing


def test_stepping_back_from_the_live_end_pauses(live, qtbot):
    assert live.disk_history.ring.flush(60.0)  # a busy machine may be behind in writing
    live.timeline.step_frames(-1)
    live.timeline.step_frames(-1)
    frozen = live.timeline.cursor.frozen.seq
    qtbot.waitUntil(lambda: live.timeline.cursor.target_seq is None, timeout=WAIT_MS)
    wait_for_seek(live, qtbot)
    assert live.mirror.seq == frozen - 2


def test_playing_after_a_pause_continues_from_the_paused_time(live, qtbot):
    live.timeline.pause()
    at_ns, seq = live.timeline.cursor_ns, live.mirror.seq
    qtbot.wait(300)
    shown = []
    live.timeline.shown.connect(lambda _: shown.append(live.mirror.seq))
    live.timeline.play()
    assert live.timeline.is_paused
    assert live.timeline.is_playing
    wait_for_seek(live, qtbot)
    assert live.timeline.cursor_ns >= at_ns - 1000
    qtbot.waitUntil(lambda: live.mirror.seq > seq + 20, timeout=WAIT_MS)
    assert seq <= shown[0] == recorded_state_at(live, at_ns).seq
    assert live.mirror.seq < live.live_mirror.seq


def test_playing_faster_catches_up_and_goes_live(live, qtbot):
    live.timeline.set_speed(64.0)
    live.timeline.go_to(early_ns(live))
    live.timeline.play()
    qtbot.waitUntil(lambda: not live.timeline.is_paused, timeout=WAIT_MS)
    assert live.mirror is live.live_mirror
    assert live.timeline.player is None


def test_jump_beyond_the_end_goes_live(live, qtbot):
    live.timeline.jump_by(-1.0)
    wait_for_seek(live, qtbot)
    live.timeline.jump_by(1000.0)
    assert not live.timeline.is_paused
    live.timeline.jump_by(1000.0)
    assert not live.timeline.is_paused


def test_jump_to_an_event_moves_the_cursor_to_the_frame_that_contains_the_event(live, qtbot):
    qtbot.waitUntil(lambda: len(live.overview.events) > 3, timeout=WAIT_MS)
    assert live.disk_history.ring.flush(60.0)
    timed = live.timeline.go_to_event(None, forward=False)
    assert timed in [live.overview.events[place] for place in range(len(live.overview.events))]
    wait_for_seek(live, qtbot)
    late_ns = live.timeline.cursor_ns - timed.time_ns  # the frame that contains the event is a little later
    assert 0 <= late_ns < SECOND_NS
    assert timed.event in [entry.event for entry in live.history.events.since(0)]
    assert not live.timeline.go_to_event(["refused"], forward=True)


def test_commands_and_replies_work_while_the_past_is_shown(live, qtbot):
    from kvscope_telemetry.messages.commands import Control

    live.timeline.go_to(early_ns(live))
    wait_for_seek(live, qtbot)
    with qtbot.waitSignal(live.replies, timeout=WAIT_MS):
        assert live.send(Control(action="reset_prefix_cache", tag=7))


def test_unwritable_history_is_reported_once_and_pausing_still_works(qapp, qtbot, settings, tmp_path):
    rings_folder().parent.mkdir(parents=True)
    rings_folder().write_text("in the way")
    with closing(make_server(tmp_path)):
        source = LiveSource(f"ipc://{tmp_path}/telemetry")
        session = Session(source)
        received = []
        session.noticed.connect(received.append)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        session.start()
        qtbot.waitUntil(lambda: session.mirror.seq > 5 and bool(received), timeout=WAIT_MS)
        session.timeline.pause()
        seq = session.mirror.seq
        session.timeline.jump_by(-1.0)
        session.timeline.step_frames(-1)
        qtbot.waitUntil(lambda: session.live_mirror.seq > seq + 5, timeout=WAIT_MS)
        assert session.mirror.seq == seq
        session.timeline.play()
        assert not session.timeline.is_paused
        assert len(received) == 1
        assert "not being recorded" in received[0]
        session.close()
        session.deleteLater()


def test_unreadable_history_is_reported_and_reopened_at_the_next_seek(live, qtbot):
    received = []
    live.noticed.connect(received.append)
    first_ns = early_ns(live)
    live.timeline.go_to(first_ns)
    wait_for_seek(live, qtbot)
    seq, source = live.mirror.seq, live.timeline.player

    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    source._reader.jump = broken
    live.timeline.go_to(first_ns + SECOND_NS)
    qtbot.waitUntil(lambda: bool(received), timeout=WAIT_MS)
    assert received == ["The recorded history cannot be read: the file cannot be read: Input/output error"]
    assert live.timeline.is_paused
    assert live.mirror.seq == seq
    live.timeline.go_to(first_ns + SECOND_NS)
    qtbot.waitUntil(lambda: live.timeline.player is not None, timeout=WAIT_MS)
    wait_for_seek(live, qtbot)
    assert live.timeline.player is not source
    assert len(received) == 1


def test_closed_session_leaves_no_history_folder_and_no_thread(own_session, threads_before, qtbot):
    own_session.timeline.go_to(own_session.timeline.range_ns[0])
    wait_for_seek(own_session, qtbot)
    folder = own_session.disk_history.ring.folder
    assert folder.is_dir()
    own_session.close()
    assert not folder.exists()
    ours = {"recording", "kvscope-playback", "kvscope-reader", "kvscope-ring-recording", "kvscope-let-go"}
    qtbot.waitUntil(
        lambda: not ours & {thread.name for thread in {*threading.enumerate()} - threads_before}, timeout=WAIT_MS
    )


def test_last_seconds_of_the_history_are_saved_to_a_file(live, qtbot, tmp_path):
    work = live.disk_history.save(tmp_path / "kept.mcap", 1.5)
    assert work.wait(60)
    assert work.result == "", work.failure
    with_state = Recording.open(tmp_path / "kept.mcap")
    assert with_state.info.duration_s == pytest.approx(1.5, abs=0.2)
    assert with_state.damage_summary == ""


def test_recording_is_complete_and_the_history_continues(live, qtbot, tmp_path):
    live.disk_history.start_recording(tmp_path / "now.mcap")
    writer = live.recorder.writer
    qtbot.waitUntil(lambda: writer.num_written > 120, timeout=WAIT_MS)
    assert "MB" in live.recorder.text
    work = live.disk_history.stop_recording()
    assert work.wait(60)
    recording = Recording.open(work.result)
    assert recording.info.is_complete
    assert recording.info.num_frames > 30
    seqs = [frame.seq for frame in recording.frames()]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    newest = live.live_mirror.seq
    qtbot.waitUntil(lambda: live.live_mirror.seq > newest + 60, timeout=WAIT_MS)
    live.disk_history.ring.flush()
    assert recorded_state_at(live, time.time_ns()).seq > newest


def test_closing_the_session_completes_a_recording(own_session, qtbot, tmp_path):
    own_session.disk_history.start_recording(tmp_path / "now.mcap")
    writer = own_session.recorder.writer
    qtbot.waitUntil(lambda: writer.num_written > 60, timeout=WAIT_MS)
    own_session.close()
    assert Recording.open(tmp_path / "now.mcap").info.is_complete

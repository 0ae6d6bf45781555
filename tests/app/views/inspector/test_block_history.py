"""Tests of the history of the selected block, with recordings and with a live engine over real sockets."""

from __future__ import annotations

import itertools
from contextlib import closing

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QSettings, Qt, QTimer
from PySide6.QtGui import QGuiApplication
from tests.app import window_driver as driver
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK
from kvscope_app.views.inspector.block_history import BlockHistory, reading_order
from kvscope_app.views.inspector.inspector_view import BLOCK, STEP, InspectorView
from kvscope_telemetry.ledger import LASTING
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 120_000
SECOND_NS = 1_000_000_000


class Clock:
    """Clock that advances by 20 ms with each call."""

    now_ns = SECOND_NS

    def __call__(self):
        self.now_ns += 20_000_000
        return self.now_ns


@pytest.fixture
def recording_and_block(tmp_path):
    """Return a recording of ten seconds with 200 blocks, and the block that changes most."""
    engine = SimulatedEngine(num_blocks=200, num_running=8, clock=Clock())
    messages = [engine.hello, engine.snapshot(), *(engine.advance() for _ in range(500))]
    with RecordingWriter(tmp_path / "r.mcap", keyframe_interval_ns=SECOND_NS) as writer:
        for message in messages:
            writer.write(message, wait=True)
    ids = np.concatenate([np.frombuffer(frame.blocks.ids, "<u4") for frame in messages[2:]])
    found, num = np.unique(ids, return_counts=True)
    return Recording.open(writer.path), int(found[np.argmax(num)])


@pytest.fixture
def playback_session(recording_and_block, qtbot):
    session = Session(PlaybackSource(recording_and_block[0], is_playing=False))
    qtbot.waitUntil(lambda: session.poll() or session.mirror.hello is not None, timeout=WAIT_MS)
    session.start()
    yield session
    session.close()
    session.deleteLater()


@pytest.fixture
def show_inspector(qtbot):
    views = []

    def make(session):
        view = InspectorView(session)
        views.append(view)
        qtbot.addWidget(view)
        view.apply_theme(DARK)
        view.resize(420, 800)
        view.show()
        view.refresh()
        return view

    yield make
    for view in views:
        view.shut_down()


def read_history(view, qtbot):
    history = view.block_history.history
    qtbot.waitUntil(lambda: history.part is not None and not history.is_reading, timeout=WAIT_MS)
    view.refresh()
    return history.part


def row_at(part, time_ns):
    index = int(np.searchsorted(part.rows["time_ns"], time_ns, "right")) - 1
    return tuple(int(part.rows[name][index]) for name in LASTING)


def test_block_history_covers_the_whole_recording(recording_and_block, playback_session, show_inspector, qtbot):
    file, block = recording_and_block
    view = show_inspector(playback_session)
    playback_session.selection.select_block(block)
    part = read_history(view, qtbot)
    assert (part.begin_ns, part.end_ns) == playback_session.timeline.range_ns
    for seconds in np.linspace(1.0, file.info.duration_s, 30):
        mirror = file.state_at(float(seconds))
        expected = tuple(int(getattr(mirror.ledger, name)[block]) for name in LASTING)
        assert row_at(part, file.start_ns + round(seconds * 1e9)) == expected
    assert view.block_history.model.rowCount() == len(part.moments) > 10
    assert f"{len(part.moments)} events" in view.block_history.note.text()
    assert view.block_history.strip.grab().width() > 0


def test_clicks_in_the_block_history_list_and_strip_seek_to_their_time(
    recording_and_block, playback_session, show_inspector, qtbot
):
    view = show_inspector(playback_session)
    playback_session.selection.select_block(recording_and_block[1])
    part = read_history(view, qtbot)
    moment = view.block_history.model.moment_at(3)
    index = view.block_history.model.index(3, 1)
    qtbot.mouseClick(
        view.block_history.table.viewport(),
        Qt.MouseButton.LeftButton,
        pos=view.block_history.table.visualRect(index).center(),
    )
    qtbot.waitUntil(lambda: abs(playback_session.timeline.cursor_ns - moment.time_ns) < 1000, timeout=WAIT_MS)
    strip = view.block_history.strip
    qtbot.mouseClick(strip, Qt.MouseButton.LeftButton, pos=QPoint(strip.width() // 4, 30))
    expected = part.begin_ns + (part.end_ns - part.begin_ns) // 4
    qtbot.waitUntil(lambda: abs(playback_session.timeline.cursor_ns - expected) < SECOND_NS, timeout=WAIT_MS)
    qtbot.keyClick(strip, Qt.Key.Key_Right)
    later = [at.time_ns for at in part.moments if at.time_ns > playback_session.timeline.cursor_ns]
    qtbot.waitUntil(lambda: abs(playback_session.timeline.cursor_ns - later[0]) < SECOND_NS, timeout=WAIT_MS)
    assert view.block_history.history.part is part  # seeking within the history does not read it again


def test_block_history_list_marks_the_event_at_the_cursor_time(
    recording_and_block, playback_session, show_inspector, qtbot
):
    view = show_inspector(playback_session)
    playback_session.selection.select_block(recording_and_block[1])
    part = read_history(view, qtbot)
    middle = part.moments[len(part.moments) // 2]
    playback_session.timeline.go_to(middle.time_ns)
    qtbot.waitUntil(lambda: abs(playback_session.timeline.cursor_ns - middle.time_ns) < 1000, timeout=WAIT_MS)
    view.refresh()
    marked = view.block_history.model.moment_at(view.block_history.model.current_row)
    assert marked.time_ns <= playback_session.timeline.cursor_ns + 1000
    assert view.block_history.model.row_at(part.begin_ns - 1) == -1
    assert view.block_history.table.visualRect(
        view.block_history.model.index(view.block_history.model.current_row, 0)
    ).isValid()


def test_block_history_list_is_copied_oldest_first(recording_and_block, playback_session, show_inspector, qtbot):
    view = show_inspector(playback_session)
    playback_session.selection.select_block(recording_and_block[1])
    part = read_history(view, qtbot)
    lines = view.block_history.table.copy().splitlines()
    assert len(lines) == len(part.moments)
    assert lines[0].split("\t")[2].startswith("Known from here")
    assert QGuiApplication.clipboard().text() == "\n".join(lines)


def test_selecting_another_block_cancels_the_reading(recording_and_block, playback_session, show_inspector, qtbot):
    view = show_inspector(playback_session)
    for block in (3, 4, 5, recording_and_block[1]):
        playback_session.selection.select_block(block)
    part = read_history(view, qtbot)
    assert set(part.rows["epoch"].tolist()) == {1}
    mirror = recording_and_block[0].state_at(5.0)
    expected = tuple(int(getattr(mirror.ledger, name)[recording_and_block[1]]) for name in LASTING)
    assert row_at(part, recording_and_block[0].start_ns + 5 * SECOND_NS) == expected


def test_block_history_is_read_even_while_the_selected_block_changes_rapidly(
    recording_and_block, playback_session, qtbot
):
    """A held key changes the block more often than the history polls."""
    history, blocks = BlockHistory(playback_session), itertools.cycle((3, recording_and_block[1]))
    stepping = QTimer(interval=1)
    stepping.timeout.connect(lambda: history.set_block(next(blocks)))
    stepping.start()
    qtbot.waitUntil(lambda: history._work is not None, timeout=WAIT_MS)
    stepping.stop()
    qtbot.waitUntil(lambda: not history.is_reading, timeout=WAIT_MS)
    assert history.part is not None
    assert history.part.rows.size
    history.close()


def test_block_deselected_immediately_is_not_read(playback_session, qtbot):
    history = BlockHistory(playback_session)
    history.set_block(3)
    history.set_block(None)
    assert not history.is_reading
    qtbot.waitUntil(lambda: driver.has_no_running_timer(history), timeout=WAIT_MS)
    history.close()


def test_step_page_lists_the_requests_of_the_step(recording_and_block, playback_session, show_inspector, qtbot):
    file, _ = recording_and_block
    view = show_inspector(playback_session)
    playback_session.timeline.go_to(file.start_ns + 4 * SECOND_NS)
    qtbot.waitUntil(lambda: playback_session.mirror.seq == file.state_at(4.0).seq, timeout=WAIT_MS)
    view.show_subject(STEP)

    def names():
        return driver.table_facts(view.table)

    qtbot.waitUntil(lambda: "Requests run" not in names(), timeout=WAIT_MS)
    frame = next(frame for frame in file.frames() if frame.seq == playback_session.mirror.seq)
    numbers = np.frombuffer(frame.batch.number, "<u4").tolist()
    assert names()["Requests"] == str(len(numbers))
    assert {f"Request #{number}" for number in numbers} <= names().keys()
    sizes = np.frombuffer(frame.batch.num_tokens, "<u4").tolist()
    assert sum("decode" in value for value in names().values()) == frame.batch.num_decode_tokens
    assert sum(sizes) == frame.batch.num_decode_tokens + frame.batch.num_prefill_tokens


def test_last_step_is_found_if_the_cursor_is_at_the_end(recording_and_block, playback_session, show_inspector, qtbot):
    """The cursor may be long after the newest frame."""
    view = show_inspector(playback_session)
    playback_session.timeline.go_to(recording_and_block[0].end_ns)
    qtbot.waitUntil(lambda: playback_session.mirror.seq == 500, timeout=WAIT_MS)
    asked = []
    view.steps.get = lambda place, at_ns: asked.append((place, at_ns))
    view.show_subject(STEP)
    hello, mirror = playback_session.mirror.hello, playback_session.mirror
    assert asked[0] == ((1, 500), mirror.time_ns + hello.wall_time_ns - hello.time_ns)


def test_switching_to_the_step_page_does_not_read_the_history_again(
    recording_and_block, playback_session, show_inspector, qtbot
):
    view = show_inspector(playback_session)
    playback_session.selection.select_block(recording_and_block[1])
    part = read_history(view, qtbot)
    view.show_subject(STEP)
    view.show_subject(BLOCK)
    assert view.block_history.history.part is part
    assert not view.block_history.history.is_reading


def test_block_history_begins_at_the_selection_if_nothing_is_recorded(engine, session, show_inspector, poll):
    engine.write_blocks([7], owner=2)
    poll(session)
    view = show_inspector(session)
    session.selection.select_block(7)
    engine.write_blocks([7], owner=2, ref_count=2)
    engine.write_blocks([7], owner=2, ref_count=0, state=2)
    poll(session)
    view.refresh()
    assert "not available" in view.block_history.note.text()
    kinds = [str(moment.kind) for moment in view.block_history.history.part.moments]
    assert kinds == ["known", "shared", "idle"]


def test_recorded_and_live_history_are_joined_without_loss(qapp, qtbot, tmp_path, show_inspector):
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    engine = SimulatedEngine(num_blocks=120, num_running=8)
    with closing(SimulatedServer(engine, f"ipc://{tmp_path}/telemetry", rate=60.0)):
        source = LiveSource(f"ipc://{tmp_path}/telemetry")
        session = Session(source)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        session.start()
        qtbot.waitUntil(lambda: len(session.overview) >= 2, timeout=WAIT_MS)
        view = show_inspector(session)
        block = int(session.mirror.ledger.last_used_step.argmax())
        session.selection.select_block(block)
        read_history(view, qtbot)
        begin_ns, num_rows = view.block_history.history.part.begin_ns, len(view.block_history.history.part.rows)
        assert begin_ns <= session.timeline.range_ns[0] + SECOND_NS
        seen = []

        def compare():
            mirror = session.live_mirror
            seen.append(tuple(int(getattr(mirror.ledger, name)[block]) for name in LASTING))
            part = view.block_history.history.part
            return row_at(part, part.end_ns) == seen[-1] and len(part.rows) > num_rows + 3

        qtbot.waitUntil(compare, timeout=WAIT_MS)
        part = view.block_history.history.part
        assert not (part.rows["how"] == 2).any()  # no event is lost where the two are joined
        assert (part.rows["how"] == 1).sum() == 1
        assert view.subject == BLOCK
        view.shut_down()
        session.close()
        session.deleteLater()


def test_history_near_the_cursor_is_read_first():
    order = list(reading_order(100 * SECOND_NS, 0, 130 * SECOND_NS))
    assert order[0] == (80 * SECOND_NS, 100 * SECOND_NS)
    assert order[1] == (100 * SECOND_NS, 120 * SECOND_NS)
    assert min(begin for begin, _ in order) == 0
    assert max(end for _, end in order) == 130 * SECOND_NS
    assert list(reading_order(5, 5, 5)) == [(5, 5)]


def test_block_history_is_read_completely_in_adjacent_slices_around_the_cursor():
    order = list(reading_order(700 * SECOND_NS, 0, 7_200 * SECOND_NS))
    known = (700 * SECOND_NS, 700 * SECOND_NS)
    for begin_ns, end_ns in order:
        assert 0 < end_ns - begin_ns <= 480 * SECOND_NS
        assert end_ns == known[0] or begin_ns == known[1]
        known = min(begin_ns, known[0]), max(end_ns, known[1])
    assert known == (0, 7_200 * SECOND_NS)
    assert len(order) < 30

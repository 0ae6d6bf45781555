"""Tests of block texts from recordings in the views, and of messages if a recording contains none."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.session.block_texts.session_texts import NOT_IN_RECORDING, NOT_RECORDED, lookup_of
from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.recorded_texts import RecordedTexts
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.recording.text_recorder import TextRecorder
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK
from kvscope_app.views.inspector.finder import Finder
from kvscope_app.views.inspector.inspector_view import REQUEST, InspectorView
from kvscope_app.views.prefixes.prefix_columns import PREFIX
from kvscope_app.views.prefixes.prefixes_view import PrefixesView
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.block_texts.published_texts import PublishedTexts
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 60_000


def text_of_block(block):
    """Return the text of a block."""
    return f"word{block}."


def make_recording(path, *, with_texts):
    """Write a recording with sixty steps of a simulated engine."""
    engine = SimulatedEngine(num_blocks=60, num_running=4)
    with RecordingWriter(path) as writer:
        texts = PublishedTexts(writer.write_texts)
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(60))):
            writer.write(message, wait=True)
            if with_texts and message is not engine.hello:
                texts.add_message(message)
                texts._next_request_s = -1.0
                texts.add_contents(
                    BlockContent(
                        block=block, token_ids=(1,) * int(engine.ledger.filled[block]), text=text_of_block(block)
                    )
                    for block in texts.due()
                )
        texts.write()


@pytest.fixture
def open_playback(tmp_path, qtbot):
    """Function that makes a recording and opens a session paused at its end."""
    sessions = []

    def make(*, with_texts):
        path = tmp_path / f"{with_texts}.mcap"
        make_recording(path, with_texts=with_texts)
        session = Session(PlaybackSource(Recording.open(path)))
        sessions.append(session)
        session.start()
        qtbot.waitUntil(lambda: session.mirror.hello is not None, timeout=WAIT_MS)
        session.timeline.pause()
        session.timeline.go_to(session.timeline.range_ns[1])
        qtbot.waitUntil(lambda: session.mirror.seq == 60, timeout=WAIT_MS)
        return session

    yield make
    for session in sessions:
        session.close()
        session.deleteLater()


@pytest.fixture
def show_view(qtbot):
    made = []

    def make(view):
        qtbot.addWidget(view)
        view.apply_theme(DARK)
        view.resize(900, 700)
        view.show()
        view.refresh()
        made.append(view)
        return view

    yield make
    for view in made:
        view.shut_down()


def shown_facts(view):
    model = view.table.facts
    rows = [model.fact_at(row) for row in range(model.rowCount())]
    return {fact.name: fact.value for fact in rows if fact is not None}


def running_request(session):
    """Return (number, block table) of a running request with a full block."""
    requests, ledger = session.mirror.requests, session.mirror.ledger
    for row in np.flatnonzero(requests.state == RequestState.RUNNING).tolist():
        number = int(requests.number[row])
        table = requests.table(number)
        if len(table) and ledger.hash[table[0]]:
            return number, table.tolist()
    raise AssertionError("the simulated engine runs requests with full blocks")


def test_prefix_tree_shows_recorded_texts(open_playback, show_view, qtbot):
    session = open_playback(with_texts=True)
    view = show_view(PrefixesView(session))
    model = view.model
    qtbot.waitUntil(lambda: "word" in str(model.index(0, PREFIX).data()), timeout=WAIT_MS)
    assert not view.note.isVisible()
    node = model.node_at(0)
    first = int(model.moment.tree.rows_of(node)[0])
    assert view.labels.text(node, 1).startswith(text_of_block(first))


def test_prefix_search_finds_texts_of_rows_that_were_never_visible(open_playback, show_view, qtbot):
    session = open_playback(with_texts=True)
    view = show_view(PrefixesView(session))
    view.resize(900, 160)
    tree = view.builder.tree
    row = int(tree.rows[-1])
    view.search.setText(text_of_block(row))
    wanted = tree.node_of(row)
    qtbot.waitUntil(lambda: view.model.row_of(wanted) is not None or view.model.shown.num_matching > 0, timeout=WAIT_MS)
    assert view.model.reveal(wanted) is not None


def test_inspector_shows_the_recorded_prompt_of_a_request(open_playback, show_view, qtbot):
    session = open_playback(with_texts=True)
    number, table = running_request(session)
    view = show_view(InspectorView(session))
    session.selection.select_request(number)
    assert view.subject == REQUEST
    qtbot.waitUntil(lambda: text_of_block(table[0]) in shown_facts(view).get("Prompt", ""), timeout=WAIT_MS)


def test_inspector_shows_the_recorded_text_and_history_of_a_block(open_playback, show_view, qtbot):
    session = open_playback(with_texts=True)
    _, table = running_request(session)
    view = show_view(InspectorView(session))
    session.selection.select_block(table[0])
    qtbot.waitUntil(lambda: shown_facts(view).get("Text") == text_of_block(table[0]), timeout=WAIT_MS)
    history = view.block_history.model

    def moments():
        return [str(history.index(row, 1).data()) for row in range(history.rowCount())]

    qtbot.waitUntil(lambda: any(text_of_block(table[0]) in moment for moment in moments()), timeout=WAIT_MS)
    session.timeline.go_to(session.timeline.range_ns[0])
    qtbot.waitUntil(lambda: session.mirror.seq < 60, timeout=WAIT_MS)
    view.refresh()
    assert shown_facts(view)["State"]


def test_find_finds_recorded_texts(open_playback, qtbot):
    session = open_playback(with_texts=True)
    _, table = running_request(session)
    finder = Finder(session)
    found = []
    finder.texts.found.connect(found.append)
    finder.find(text_of_block(table[0]))
    qtbot.waitUntil(lambda: "Searched" in finder.texts.note, timeout=WAIT_MS)
    assert table[0] in [finding.block for finding in found]
    finder.choose(found[0])
    assert session.selection.block == found[0].block
    finder.deleteLater()


def test_find_finds_texts_of_another_time_and_seeks_there(open_playback, qtbot):
    session = open_playback(with_texts=True)
    _, table = running_request(session)
    session.timeline.go_to(session.timeline.range_ns[0])
    qtbot.waitUntil(lambda: session.mirror.seq < 60, timeout=WAIT_MS)
    finder = Finder(session)
    found = []
    finder.texts.found.connect(found.append)
    finder.find(text_of_block(table[-2]))
    qtbot.waitUntil(lambda: "Searched" in finder.texts.note, timeout=WAIT_MS)
    later = [finding for finding in found if finding.time_ns is not None]
    assert later
    finder.choose(later[-1])
    assert session.selection.block == later[-1].block
    assert abs(session.timeline.cursor_ns - later[-1].time_ns) < 1_000_000_000
    finder.deleteLater()


def test_unreadable_texts_are_reported_in_inspector_and_find(open_playback, show_view, qtbot, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    session = open_playback(with_texts=True)
    monkeypatch.setattr(RecordedTexts, "_read", broken)
    _, table = running_request(session)
    inspector, finder = show_view(InspectorView(session)), Finder(session)
    session.selection.select_block(table[0])
    why = "Texts cannot be read: Input/output error"
    qtbot.waitUntil(lambda: inspector.refresh() or shown_facts(inspector)["Text"] == why, timeout=WAIT_MS)
    finder.find("words")
    why = "Other times could not be searched: Input/output error."
    qtbot.waitUntil(lambda: finder.texts.note.endswith(why), timeout=WAIT_MS)
    finder.deleteLater()


def test_recording_without_texts_is_reported_in_all_views(open_playback, show_view):
    session = open_playback(with_texts=False)
    number, table = running_request(session)
    prefixes, inspector, finder = show_view(PrefixesView(session)), show_view(InspectorView(session)), Finder(session)
    assert prefixes.note.isVisible()
    assert prefixes.note.text() == NOT_IN_RECORDING
    session.selection.select_block(table[0])
    assert shown_facts(inspector)["Text"] == NOT_IN_RECORDING
    session.selection.select_request(number)
    assert shown_facts(inspector)["Text"] == NOT_IN_RECORDING
    finder.find("words")
    assert finder.texts.note == NOT_IN_RECORDING
    assert session.texts.why_not(lookup_of(session.mirror, table[0])) == NOT_IN_RECORDING
    finder.deleteLater()


@pytest.fixture
def live_session(settings, tmp_path, qtbot):
    """Live session over a real socket that records its history without texts."""
    endpoint = f"ipc://{tmp_path}/telemetry"
    with closing(SimulatedServer(SimulatedEngine(num_blocks=60, num_running=4), endpoint, rate=20.0)):
        source = LiveSource(endpoint)
        session = Session(source)
        session.set_disk_history(DiskHistory(make_ring(settings), source.set_sink))
        session.start()
        qtbot.waitUntil(lambda: session.may_operate and session.mirror.step > 5, timeout=WAIT_MS)
        yield session
        session.close()
        session.deleteLater()


def test_recorded_history_has_texts_of_blocks_that_are_gone(live_session, qtbot):
    keeping = TextRecorder(live_session)
    keeping.set_on(True)
    qtbot.waitUntil(lambda: live_session.disk_history.has_texts, timeout=WAIT_MS)
    keeping.set_on(False)
    ring_recording = live_session.disk_history.open_recording(lambda share: True)
    text = next(text for text in ring_recording.texts() if text.hash)
    gone = BlockTextLookup(text.epoch, 10**6, 0, 16, int(text.hash, 16))  # not a row of the engine

    def has_text():
        live_session.texts.request("test", [gone])
        return live_session.texts.get(gone) is not None

    qtbot.waitUntil(has_text, timeout=WAIT_MS)
    assert live_session.texts.get(gone).text == text.text


def test_live_engine_provides_texts_also_while_paused(live_session, qtbot):
    def full_blocks():
        ledger = live_session.live_mirror.ledger
        return np.flatnonzero((ledger.hash != 0) & (ledger.state == BlockState.ACTIVE))

    qtbot.waitUntil(lambda: full_blocks().size > 0, timeout=WAIT_MS)

    def has_text():
        asked = lookup_of(live_session.mirror, int(full_blocks()[0]))
        live_session.texts.request("test", [asked])
        return live_session.texts.get(asked) is not None

    qtbot.waitUntil(has_text, timeout=WAIT_MS)
    live_session.timeline.pause()
    known = [lookup_of(live_session.mirror, row) for row in range(live_session.mirror.num_rows)]
    assert any(live_session.texts.get(asked) is not None for asked in known)
    gone = type(known[0])(live_session.mirror.epoch, 3, 999_999, 16, 0x123456789)  # a block that never existed
    assert live_session.texts.why_not(gone) == NOT_RECORDED

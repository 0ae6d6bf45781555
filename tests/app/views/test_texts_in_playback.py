"""Texts of a recording in the views, at any moment; and what is said where a recording has none. Real recordings."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.session.block_texts.session_texts import NOT_IN_RECORDING, NOT_RECORDED, asked_of
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
from kvscope_telemetry.block_texts.block_texts import Asked
from kvscope_telemetry.block_texts.published_texts import PublishedTexts
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_MS = 60_000


def word(block):
    """What block holds, in a word of its own."""
    return f"word{block}."


def make_recording(path, *, with_texts):
    """Sixty steps of a simulated engine."""
    engine = SimulatedEngine(num_blocks=60, num_running=4)
    with RecordingWriter(path) as writer:
        texts = PublishedTexts(writer.write_texts)
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(60))):
            writer.write(message, wait=True)
            if with_texts and message is not engine.hello:
                texts.follow(message)
                texts._next_s = -1.0
                texts.add_contents(
                    BlockContent(block=block, token_ids=(1,) * int(engine.ledger.filled[block]), text=word(block))
                    for block in texts.due()
                )
        texts.write()


@pytest.fixture
def play(tmp_path, qtbot):
    """Plays a recording that is made for it, standing where its state is."""
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
def show(qtbot):
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


def facts(view):
    model = view.table.facts
    rows = [model.fact_at(row) for row in range(model.rowCount())]
    return {fact.name: fact.value for fact in rows if fact is not None}


def held(session):
    """A request with text in a full block."""
    requests, ledger = session.mirror.requests, session.mirror.ledger
    for row in np.flatnonzero(requests.state == RequestState.RUNNING).tolist():
        number = int(requests.number[row])
        table = requests.table(number)
        if len(table) and ledger.hash[table[0]]:
            return number, table.tolist()
    raise AssertionError("the simulated engine runs requests with full blocks")


def test_the_prefix_tree_has_texts(play, show, qtbot):
    session = play(with_texts=True)
    view = show(PrefixesView(session))
    model = view.model
    qtbot.waitUntil(lambda: "word" in str(model.index(0, PREFIX).data()), timeout=WAIT_MS)
    assert not view.note.isVisible()
    node = model.node_at(0)
    first = int(model.moment.tree.rows_of(node)[0])
    assert view.labels.text(node, 1).startswith(word(first))


def test_words_find_rows_that_were_never_looked_at(play, show, qtbot):
    session = play(with_texts=True)
    view = show(PrefixesView(session))
    view.resize(900, 160)
    tree = view.builder.tree
    row = int(tree.rows[-1])
    view.search.setText(word(row))
    wanted = tree.node_of(row)
    qtbot.waitUntil(lambda: view.model.row_of(wanted) is not None or view.model.shown.num_matching > 0, timeout=WAIT_MS)
    assert view.model.reveal(wanted) is not None


def test_the_inspector_tells_prompt_and_output_of_a_request(play, show, qtbot):
    session = play(with_texts=True)
    number, table = held(session)
    view = show(InspectorView(session))
    session.selection.select_request(number)
    assert view.subject == REQUEST
    qtbot.waitUntil(lambda: word(table[0]) in facts(view).get("Prompt", ""), timeout=WAIT_MS)


def test_the_inspector_tells_a_blocks_text_and_what_it_held_before(play, show, qtbot):
    session = play(with_texts=True)
    _, table = held(session)
    view = show(InspectorView(session))
    session.selection.select_block(table[0])
    qtbot.waitUntil(lambda: facts(view).get("Text") == word(table[0]), timeout=WAIT_MS)
    history = view.block_history.model

    def moments():
        return [str(history.index(row, 1).data()) for row in range(history.rowCount())]

    qtbot.waitUntil(lambda: any(word(table[0]) in moment for moment in moments()), timeout=WAIT_MS)
    session.timeline.go_to(session.timeline.range_ns[0])
    qtbot.waitUntil(lambda: session.mirror.seq < 60, timeout=WAIT_MS)
    view.refresh()
    assert facts(view)["State"]


def test_words_are_found_in_playback(play, qtbot):
    session = play(with_texts=True)
    _, table = held(session)
    finder = Finder(session)
    found = []
    finder.texts.found.connect(found.append)
    finder.look(word(table[0]))
    qtbot.waitUntil(lambda: "Searched" in finder.texts.note, timeout=WAIT_MS)
    assert table[0] in [finding.block for finding in found]
    finder.choose(found[0])
    assert session.selection.block == found[0].block
    finder.deleteLater()


def test_words_of_another_time_are_found_and_gone_to(play, qtbot):
    session = play(with_texts=True)
    _, table = held(session)
    session.timeline.go_to(session.timeline.range_ns[0])
    qtbot.waitUntil(lambda: session.mirror.seq < 60, timeout=WAIT_MS)
    finder = Finder(session)
    found = []
    finder.texts.found.connect(found.append)
    finder.look(word(table[-2]))
    qtbot.waitUntil(lambda: "Searched" in finder.texts.note, timeout=WAIT_MS)
    later = [finding for finding in found if finding.time_ns is not None]
    assert later
    finder.choose(later[-1])
    assert session.selection.block == later[-1].block
    assert abs(session.timeline.cursor_ns - later[-1].time_ns) < 1_000_000_000
    finder.deleteLater()


def test_texts_that_cannot_be_read_are_told_of_everywhere(play, show, qtbot, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    session = play(with_texts=True)
    monkeypatch.setattr(RecordedTexts, "_read", broken)
    _, table = held(session)
    inspector, finder = show(InspectorView(session)), Finder(session)
    session.selection.select_block(table[0])
    why = "Texts cannot be read: Input/output error"
    qtbot.waitUntil(lambda: inspector.refresh() or facts(inspector)["Text"] == why, timeout=WAIT_MS)
    finder.look("words")
    why = "Other times could not be searched: Input/output error."
    qtbot.waitUntil(lambda: finder.texts.note.endswith(why), timeout=WAIT_MS)
    finder.deleteLater()


def test_a_recording_without_texts_says_so_everywhere(play, show):
    session = play(with_texts=False)
    number, table = held(session)
    prefixes, inspector, finder = show(PrefixesView(session)), show(InspectorView(session)), Finder(session)
    assert prefixes.note.isVisible()
    assert prefixes.note.text() == NOT_IN_RECORDING
    session.selection.select_block(table[0])
    assert facts(inspector)["Text"] == NOT_IN_RECORDING
    session.selection.select_request(number)
    assert facts(inspector)["Text"] == NOT_IN_RECORDING
    finder.look("words")
    assert finder.texts.note == NOT_IN_RECORDING
    assert session.texts.why_not(asked_of(session.mirror, table[0])) == NOT_IN_RECORDING
    finder.deleteLater()


@pytest.fixture
def live(settings, tmp_path, qtbot):
    """A live session on a real socket that keeps its past, without texts."""
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


def test_the_kept_past_tells_what_the_engine_no_longer_has(live, qtbot):
    keeping = TextRecorder(live)
    keeping.set_on(True)
    qtbot.waitUntil(lambda: live.disk_history.has_texts, timeout=WAIT_MS)
    keeping.set_on(False)
    ring_recording = live.disk_history.open_recording(lambda share: True)
    text = next(text for text in ring_recording.texts() if text.hash)
    gone = Asked(text.epoch, 10**6, 0, 16, int(text.hash, 16))  # no row of the engine's

    def tells():
        live.texts.request("test", [gone])
        return live.texts.get(gone) is not None

    qtbot.waitUntil(tells, timeout=WAIT_MS)
    assert live.texts.get(gone).text == text.text


def test_the_engine_tells_at_the_live_end_and_of_a_pause_what_is_still_so(live, qtbot):
    def full():
        ledger = live.live_mirror.ledger
        return np.flatnonzero((ledger.hash != 0) & (ledger.state == BlockState.ACTIVE))

    qtbot.waitUntil(lambda: full().size > 0, timeout=WAIT_MS)

    def tells():
        asked = asked_of(live.mirror, int(full()[0]))
        live.texts.request("test", [asked])
        return live.texts.get(asked) is not None

    qtbot.waitUntil(tells, timeout=WAIT_MS)
    live.timeline.pause()
    known = [asked_of(live.mirror, row) for row in range(live.mirror.num_rows)]
    assert any(live.texts.get(asked) is not None for asked in known)
    gone = type(known[0])(live.mirror.epoch, 3, 999_999, 16, 0x123456789)  # nobody's block
    assert live.texts.why_not(gone) == NOT_RECORDED

"""Find, in the real window: a block, a request, a step, an id, words in blocks."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from kvscope_app.views.inspector.find_sheet import FindSheet
from kvscope_app.views.inspector.findings import findings
from kvscope_app.views.inspector.inspector_view import BLOCK
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary, TimedEvent

pytestmark = pytest.mark.qt_log_ignore("grabbing the keyboard", extend=True)


@pytest.fixture
def busy(engine, session, poll):
    """Request 12 holds blocks 7 and 8, block 30 is cached."""
    engine.request(12, blocks=[7, 8])
    engine.hold([7, 8], owner=12)
    engine.hold([30], owner=3, state=BlockState.CACHED, ref_count=0)
    poll(session)
    return session


def answer(engine, session, poll, texts):
    """The engine answers the newest question about texts."""
    question = engine.source.sent[-1]
    assert isinstance(question, GetBlockText)
    contents = tuple(BlockContent(block=b, token_ids=(1,), text=texts.get(b, "")) for b in question.blocks)
    engine.source.replies.append(BlockText(contents=contents, tag=question.tag))
    poll(session)


def open_find(window):
    window.actions_by_name["find"].trigger()
    return window.findChildren(FindSheet)[-1]


def shown(sheet):
    return [sheet.list.item(row).data(Qt.ItemDataRole.UserRole) for row in range(sheet.list.count())]


def test_a_number_is_a_block_or_a_request(busy):
    found = findings("12", busy.mirror, SessionOverview())
    assert [(f.block, f.request) for f in found] == [(12, None), (None, 12)]
    assert found[1].detail == "running, 2 blocks  ·  chat-12"
    assert [f.request for f in findings("#12", busy.mirror, SessionOverview())] == [12]
    assert [f.block for f in findings("block 7", busy.mirror, SessionOverview())] == [7]
    assert findings("9999", busy.mirror, SessionOverview()) == []
    assert findings("  ", busy.mirror, SessionOverview()) == []


def test_a_part_of_an_adapter_s_name_is_its_requests(busy, engine, poll):
    engine.request(13, adapter="sql")
    poll(busy)
    (found,) = findings("sql", busy.mirror, SessionOverview())
    assert (found.request, found.detail) == (13, "running, 0 blocks  ·  chat-13  ·  sql")


def test_a_part_of_an_id_is_a_request(busy):
    assert [f.request for f in findings("CHAT-1", busy.mirror, SessionOverview())] == [12]


def test_places_of_lower_tiers_have_numbers_of_their_own(make_engine, make_session):
    session = make_session(make_engine(num_host=8, num_disk=4))
    assert [f.block for f in findings("h3", session.mirror, SessionOverview())] == [67]
    assert [f.block for f in findings("D3", session.mirror, SessionOverview())] == [75]
    assert [f.block for f in findings("3", session.mirror, SessionOverview())] == [3, 67, 75]
    assert findings("h9", session.mirror, SessionOverview()) == []


def test_what_is_over_leads_to_when_it_was(busy):
    overview = SessionOverview()
    start_ns = 1_700_000_000 * SECOND_NS
    overview.extend(
        [Summary(time_ns=start_ns + at * SECOND_NS, epoch=7, step=10 * (at + 1)) for at in range(5)],
        [TimedEvent(start_ns + 5, 7, Event(kind="admitted", time_ns=1, number=2))],
    )
    (gone,) = findings("#2", busy.mirror, overview)
    assert (gone.request, gone.epoch, gone.time_ns) == (2, 7, start_ns + 5)
    (step,) = findings("step 25", busy.mirror, overview)
    assert step.time_ns == start_ns + 2 * SECOND_NS


def test_enter_selects_in_every_view(busy, make_window, qtbot):
    window = make_window(busy, with_views=("requests", "inspector"), size=(1500, 900))
    sheet = open_find(window)
    qtbot.keyClicks(sheet.line, "7")
    assert shown(sheet)[0].block == 7
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert (busy.selection.block, busy.selection.request) == (7, 12)
    assert window.page_map.canvas.selected_row == 7
    window.actions_by_name["inspect"].trigger()
    inspector = window.views["inspector"]
    assert inspector.isVisible()
    inspector.refresh()
    assert (inspector.subject, inspector.heading.text()) == (BLOCK, "Block 7")
    window.actions_by_name["clear"].trigger()
    assert (busy.selection.block, busy.selection.request) == (None, None)


def test_arrows_choose_among_what_was_found(busy, make_window, qtbot):
    sheet = open_find(make_window(busy))
    qtbot.keyClicks(sheet.line, "12")
    qtbot.keyClick(sheet.line, Qt.Key.Key_Down)
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert (busy.selection.block, busy.selection.request) == (None, 12)


def test_words_are_looked_for_in_blocks_and_across_them(engine, busy, make_window, poll, qtbot):
    sheet = open_find(make_window(busy))
    qtbot.keyClicks(sheet.line, "Blue Sky")
    assert shown(sheet) == []
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=120_000)
    assert set(engine.source.sent[-1].blocks) == {7, 8, 30}
    answer(engine, busy, poll, {7: "why is the blu", 8: "e sky\nso high", 30: "the blue sky again"})
    found = shown(sheet)
    assert [f.block for f in found] == [7, 30]
    assert "blue sky so high" in found[0].text
    assert "Searched" in sheet.note.text()
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert busy.selection.block == 7


def test_enter_goes_from_one_place_of_a_text_to_the_next(engine, busy, make_window, poll, qtbot):
    sheet = open_find(make_window(busy))
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=30_000)
    answer(engine, busy, poll, {7: "blue sky", 8: "no", 30: "the sky again"})
    assert [f.block for f in shown(sheet)] == [7, 30]
    for key, modifier, block in (
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 7),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 30),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 7),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier, 30),
    ):
        qtbot.keyClick(sheet.line, key, modifier)
        assert (sheet.isVisible(), busy.selection.block) == (True, block)
    sheet.close()


def test_a_text_twice_across_two_blocks_is_found_twice(engine, busy, make_window, poll, qtbot):
    sheet = open_find(make_window(busy))
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=30_000)
    answer(engine, busy, poll, {7: "blue s", 8: "ky, high sky"})
    assert [f.block for f in shown(sheet)] == [7, 8]


def test_a_viewer_is_told_that_texts_are_not_for_them(engine, busy, make_window, qtbot):
    engine.source.status = SourceStatus(SourceState.LIVE, role="viewer")
    busy.poll()
    sheet = open_find(make_window(busy))
    qtbot.keyClicks(sheet.line, "sky")
    assert "you are a viewer" in sheet.note.text()
    qtbot.wait(300)  # longer than typing is waited for
    assert engine.source.sent == []


def test_an_engine_that_does_not_answer_is_not_waited_for(engine, busy, make_window, qtbot):
    sheet = open_find(make_window(busy))
    sheet._finder.texts._reply_timer.setInterval(50)
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: "does not answer" in sheet.note.text(), timeout=120_000)


def test_a_double_click_on_a_block_opens_the_inspector(busy, make_window, qtbot):
    window = make_window(busy, with_views=("inspector",), size=(1500, 900))
    assert not window.docks["inspector"].isVisible()
    canvas = window.page_map.canvas
    at = canvas.cell_rect(8).center()
    qtbot.mouseClick(canvas, Qt.MouseButton.LeftButton, pos=at)
    qtbot.mouseDClick(canvas, Qt.MouseButton.LeftButton, pos=at)
    assert window.docks["inspector"].isVisible()
    assert (busy.selection.block, busy.selection.request) == (8, 12)

"""Tests of Find: blocks, requests, steps, ids and text in blocks."""

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
def busy_session(engine, session, poll):
    """Session in which request 12 holds blocks 7 and 8, and block 30 is cached."""
    engine.request(12, blocks=[7, 8])
    engine.write_blocks([7, 8], owner=12)
    engine.write_blocks([30], owner=3, state=BlockState.CACHED, ref_count=0)
    poll(session)
    return session


def reply_with_texts(engine, session, poll, texts):
    """Reply to the newest question for block texts."""
    question = engine.source.sent[-1]
    assert isinstance(question, GetBlockText)
    contents = tuple(BlockContent(block=b, token_ids=(1,), text=texts.get(b, "")) for b in question.blocks)
    engine.source.replies.append(BlockText(contents=contents, tag=question.tag))
    poll(session)


def open_find(window):
    window.actions_by_name["find"].trigger()
    return window.findChildren(FindSheet)[-1]


def shown_findings(sheet):
    return [sheet.list.item(row).data(Qt.ItemDataRole.UserRole) for row in range(sheet.list.count())]


def test_number_typed_into_find_finds_the_block_and_the_request_with_that_number(busy_session):
    found = findings("12", busy_session.mirror, SessionOverview())
    assert [(f.block, f.request) for f in found] == [(12, None), (None, 12)]
    assert found[1].detail == "running, 2 blocks  ·  chat-12"
    assert [f.request for f in findings("#12", busy_session.mirror, SessionOverview())] == [12]
    assert [f.block for f in findings("block 7", busy_session.mirror, SessionOverview())] == [7]
    assert findings("9999", busy_session.mirror, SessionOverview()) == []
    assert findings("  ", busy_session.mirror, SessionOverview()) == []


def test_adapter_name_finds_its_requests(busy_session, engine, poll):
    engine.request(13, adapter="sql")
    poll(busy_session)
    (found,) = findings("sql", busy_session.mirror, SessionOverview())
    assert (found.request, found.detail) == (13, "running, 0 blocks  ·  chat-13  ·  sql")


def test_part_of_an_id_finds_its_request(busy_session):
    assert [f.request for f in findings("CHAT-1", busy_session.mirror, SessionOverview())] == [12]


def test_slots_of_lower_tiers_are_found_by_prefixed_numbers(make_engine, make_session):
    session = make_session(make_engine(num_host=8, num_disk=4))
    assert [f.block for f in findings("h3", session.mirror, SessionOverview())] == [67]
    assert [f.block for f in findings("D3", session.mirror, SessionOverview())] == [75]
    assert [f.block for f in findings("3", session.mirror, SessionOverview())] == [3, 67, 75]
    assert findings("h9", session.mirror, SessionOverview()) == []


def test_finished_request_and_past_step_are_found_with_their_time(busy_session):
    overview = SessionOverview()
    start_ns = 1_700_000_000 * SECOND_NS
    overview.extend(
        [Summary(time_ns=start_ns + at * SECOND_NS, epoch=7, step=10 * (at + 1)) for at in range(5)],
        [TimedEvent(start_ns + 5, 7, Event(kind="admitted", time_ns=1, number=2))],
    )
    (gone,) = findings("#2", busy_session.mirror, overview)
    assert (gone.request, gone.epoch, gone.time_ns) == (2, 7, start_ns + 5)
    (step,) = findings("step 25", busy_session.mirror, overview)
    assert step.time_ns == start_ns + 2 * SECOND_NS


def test_enter_in_find_selects_the_found_block_in_every_view(busy_session, make_window, qtbot):
    window = make_window(busy_session, with_views=("requests", "inspector"), size=(1500, 900))
    sheet = open_find(window)
    qtbot.keyClicks(sheet.line, "7")
    assert shown_findings(sheet)[0].block == 7
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert (busy_session.selection.block, busy_session.selection.request) == (7, 12)
    assert window.page_map.canvas.selected_row == 7
    window.actions_by_name["inspect"].trigger()
    inspector = window.views["inspector"]
    assert inspector.isVisible()
    inspector.refresh()
    assert (inspector.subject, inspector.heading.text()) == (BLOCK, "Block 7")
    window.actions_by_name["clear"].trigger()
    assert (busy_session.selection.block, busy_session.selection.request) == (None, None)


def test_down_key_and_enter_in_find_select_the_second_result(busy_session, make_window, qtbot):
    sheet = open_find(make_window(busy_session))
    qtbot.keyClicks(sheet.line, "12")
    qtbot.keyClick(sheet.line, Qt.Key.Key_Down)
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert (busy_session.selection.block, busy_session.selection.request) == (None, 12)


def test_text_is_found_in_blocks_and_across_block_boundaries(engine, busy_session, make_window, poll, qtbot):
    sheet = open_find(make_window(busy_session))
    qtbot.keyClicks(sheet.line, "Blue Sky")
    assert shown_findings(sheet) == []
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=120_000)
    assert set(engine.source.sent[-1].blocks) == {7, 8, 30}
    reply_with_texts(engine, busy_session, poll, {7: "why is the blu", 8: "e sky\nso high", 30: "the blue sky again"})
    found = shown_findings(sheet)
    assert [f.block for f in found] == [7, 30]
    assert "blue sky so high" in found[0].text
    assert "Searched" in sheet.note.text()
    qtbot.keyClick(sheet.line, Qt.Key.Key_Return)
    assert busy_session.selection.block == 7


def test_enter_steps_through_the_places_of_a_text(engine, busy_session, make_window, poll, qtbot):
    sheet = open_find(make_window(busy_session))
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=30_000)
    reply_with_texts(engine, busy_session, poll, {7: "blue sky", 8: "no", 30: "the sky again"})
    assert [f.block for f in shown_findings(sheet)] == [7, 30]
    for key, modifier, block in (
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 7),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 30),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, 7),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier, 30),
    ):
        qtbot.keyClick(sheet.line, key, modifier)
        assert (sheet.isVisible(), busy_session.selection.block) == (True, block)
    sheet.close()


def test_text_across_a_boundary_and_in_the_next_block_is_found_twice(engine, busy_session, make_window, poll, qtbot):
    sheet = open_find(make_window(busy_session))
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=30_000)
    reply_with_texts(engine, busy_session, poll, {7: "blue s", 8: "ky, high sky"})
    assert [f.block for f in shown_findings(sheet)] == [7, 8]


def test_viewer_cannot_search_texts_and_sees_the_reason(engine, busy_session, make_window, qtbot):
    engine.source.status = SourceStatus(SourceState.LIVE, role="viewer")
    busy_session.poll()
    sheet = open_find(make_window(busy_session))
    qtbot.keyClicks(sheet.line, "sky")
    assert "you are a viewer" in sheet.note.text()
    qtbot.wait(300)  # longer than the delay after typing
    assert engine.source.sent == []


def test_search_reports_an_engine_that_does_not_answer(engine, busy_session, make_window, qtbot):
    sheet = open_find(make_window(busy_session))
    sheet._finder.texts._reply_timer.setInterval(50)
    qtbot.keyClicks(sheet.line, "sky")
    qtbot.waitUntil(lambda: "does not answer" in sheet.note.text(), timeout=120_000)


def test_double_click_on_a_block_opens_the_inspector(busy_session, make_window, qtbot):
    window = make_window(busy_session, with_views=("inspector",), size=(1500, 900))
    assert not window.docks["inspector"].isVisible()
    canvas = window.page_map.canvas
    at = canvas.cell_rect(8).center()
    qtbot.mouseClick(canvas, Qt.MouseButton.LeftButton, pos=at)
    qtbot.mouseDClick(canvas, Qt.MouseButton.LeftButton, pos=at)
    assert window.docks["inspector"].isVisible()
    assert (busy_session.selection.block, busy_session.selection.request) == (8, 12)

"""Tests of the inspector: facts about blocks, requests and steps, links, copying and updates."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.inspector.fact_table import FactTable
from kvscope_app.views.inspector.facts import Fact, page
from kvscope_app.views.inspector.inspector_view import BLOCK, EMPTY_TEXTS, REQUEST, STEP, InspectorView
from kvscope_telemetry.ledger import BlockState, attention_units
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Counters, KVGroup
from kvscope_telemetry.producer.cache_state import CacheState
from kvscope_telemetry.source import Update


@pytest.fixture
def show_inspector(qtbot):
    def make(session, size=(360, 800)):
        view = InspectorView(session)
        qtbot.addWidget(view)
        view.apply_theme(DARK)
        view.resize(*size)
        view.show()
        view.refresh()
        return view

    return make


def shown_facts(view):
    """Return names and values of the table."""
    facts = [view.table.facts.fact_at(row) for row in range(view.table.facts.rowCount())]
    return [(fact.name, fact.value) for fact in facts if fact is not None]


def row_of(view, name):
    model = view.table.facts
    return next(row for row in range(model.rowCount()) if (f := model.fact_at(row)) is not None and f.name == name)


def click_fact(view, qtbot, name, column=1):
    table = view.table
    index = table.facts.index(row_of(view, name), column)
    table.scrollTo(index)
    qtbot.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, pos=table.visualRect(index).center())


@pytest.fixture
def shared_session(engine, session, poll):
    """Session in which requests 2 and 5 share block 7, and request 2 continues in block 20."""
    engine.request(2, blocks=[7, 20])
    engine.request(5, blocks=[7])
    engine.write_blocks([7], owner=2, ref_count=2)
    engine.write_blocks([20], owner=2, filled=5)
    poll(session)
    return session


def test_request_page_shows_its_adapter(engine, session, poll, show_inspector):
    engine.request(2, blocks=[7], adapter="sql")
    engine.request(5, blocks=[8])
    poll(session)
    view = show_inspector(session)
    session.selection.select_request(2)
    assert ("LoRA", "sql") in shown_facts(view)
    session.selection.select_request(5)
    assert "LoRA" not in [name for name, _ in shown_facts(view)]


def test_empty_inspector_explains_how_to_select(session, show_inspector):
    view = show_inspector(session)
    assert EMPTY_TEXTS[BLOCK] in driver.visible_texts(view)
    assert not view.copy_button.isEnabled()
    view.show_subject(REQUEST)
    assert EMPTY_TEXTS[REQUEST] in driver.visible_texts(view)


def test_block_page_shows_its_holders_and_neighbours(shared_session, show_inspector):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(7)
    facts = shown_facts(view)
    assert view.heading.text() == "Block 7"
    assert ("State", "shared") in facts
    assert ("Request #2", "1 of 2 blocks, tokens 0 to 15") in facts
    assert ("Next block", "Block 20: active, request #2") in facts
    assert ("Request #5", "1 of 1 block, tokens 0 to 15") in facts
    assert ("Before", "Block 6: free") in facts
    assert ("References", "2") in facts
    assert ("Size", "360.0 KiB") in facts


def test_attention_is_shown_for_blocks_and_requests(engine, shared_session, show_inspector, poll):
    engine.ledger.attention[[7, 20]] = attention_units(np.array([0.031, 0.0002], np.float32))
    engine.ledger.attention_step[[7, 20]] = 2
    engine.write_blocks([7], owner=2, ref_count=2)
    engine.write_blocks([20], owner=2, filled=5)
    engine.frame()
    poll(shared_session)
    view = show_inspector(shared_session)
    shared_session.selection.select_block(20)
    ago = shared_session.mirror.step - 2
    assert ("Attention", f"0.02 % of request #2's, {ago} steps ago") in shown_facts(view)
    shared_session.selection.select_block(7)
    assert ("Attention", f"3.1 % of a request's, {ago} steps ago") in shown_facts(view)
    shared_session.selection.select_request(2)
    words = "2 of 2 blocks get less than a tenth of an even share; together 3.1 % of the attention"
    assert ("Cold blocks", words) in shown_facts(view)
    assert ("Coldest block", "Block 20, 0.02 %") in shown_facts(view)
    shared_session.selection.select_block(6)
    assert "Attention" not in dict(shown_facts(view))


def test_speculation_is_shown_for_requests_with_drafts(engine, shared_session, show_inspector, poll):
    view = show_inspector(shared_session)
    shared_session.selection.select_request(2)
    assert "Speculation" not in dict(shown_facts(view))
    standing = shared_session.mirror.requests.pack(np.array([0]), np.array([2]))
    guessed = msgspec.structs.replace(standing, num_draft_tokens=b"\x08\0\0\0", num_accepted_tokens=b"\6\0\0\0")
    engine.frame(requests=(guessed,))
    poll(shared_session)
    view.refresh()
    assert ("Speculation", "6 of 8 drafts accepted, 75.0 %") in shown_facts(view)


def test_share_of_layers_that_skipped_a_block_is_shown(engine, shared_session, show_inspector, poll):
    engine.ledger.skipped[[7, 20]] = attention_units(np.array([0.25, 0.0], np.float32))
    engine.write_blocks([7], owner=2, ref_count=2)
    engine.write_blocks([20], owner=2, filled=5)
    poll(shared_session)
    view = show_inspector(shared_session)
    shared_session.selection.select_block(7)
    assert ("Skipped by attention", "by 25.0 % of the sparse layers and heads") in shown_facts(view)
    shared_session.selection.select_block(20)
    assert ("Skipped by attention", "by no layer or head") in shown_facts(view)
    shared_session.selection.select_block(6)
    assert "Skipped by attention" not in dict(shown_facts(view))


def test_links_select_blocks_and_requests(shared_session, show_inspector, qtbot):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(7)
    click_fact(view, qtbot, "Next block")
    assert shared_session.selection.block == 20
    assert view.heading.text() == "Block 20"
    click_fact(view, qtbot, "Owner")
    assert shared_session.selection.request == 2
    assert view.subject == REQUEST
    assert view.heading.text() == "Request #2"
    assert ("Holds", "Request #2: 2 blocks, 720.0 KiB, 21 of 32 slots filled") in shown_facts(view)
    click_fact(view, qtbot, "First block")
    assert (shared_session.selection.block, view.subject) == (7, BLOCK)


def test_click_on_the_name_column_in_the_inspector_follows_no_link(shared_session, show_inspector, qtbot):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(7)
    click_fact(view, qtbot, "Next block", column=0)
    assert shared_session.selection.block == 7


def test_inspector_shows_the_last_selection(shared_session, show_inspector):
    view = show_inspector(shared_session)
    shared_session.selection.select_request(5)
    assert view.heading.text() == "Request #5"
    shared_session.selection.select_block(20)
    assert view.heading.text() == "Block 20"
    shared_session.selection.clear()
    assert view.empty_label.isVisible()


def test_new_inspector_shows_the_existing_selection(shared_session, show_inspector):
    shared_session.selection.select_request(5)
    assert show_inspector(shared_session).heading.text() == "Request #5"


def test_inspector_facts_are_copied_as_tab_separated_lines(shared_session, show_inspector, qtbot):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(20)
    qtbot.mouseClick(view.copy_button, Qt.MouseButton.LeftButton)
    text = QGuiApplication.clipboard().text()
    assert "State\tactive\n" in text
    assert "Filled\t5 of 16 tokens" in text
    assert len(text.splitlines()) == len(shown_facts(view))
    view.table.selectRow(row_of(view, "Filled"))
    qtbot.keyClick(view.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == "Filled\t5 of 16 tokens"


def test_inspector_updates_values_and_keeps_the_selected_row(engine, shared_session, show_inspector, poll):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(20)
    row = row_of(view, "Filled")
    view.table.selectRow(row)
    engine.write_blocks([20], owner=2, filled=9)
    poll(shared_session)
    view.refresh()
    assert ("Filled", "9 of 16 tokens") in shown_facts(view)
    assert {index.row() for index in view.table.selectedIndexes()} == {row}


def test_selected_fact_stays_selected_when_rows_are_inserted(engine, shared_session, show_inspector, poll):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(20)
    view.table.selectRow(row_of(view, "Filled"))
    before = row_of(view, "Filled")
    engine.ledger.hash[20], engine.ledger.prefix_hits[20] = 7, 3
    engine.write_blocks([20], owner=2, filled=9)
    poll(shared_session)
    view.refresh()
    assert [name for name, _ in shown_facts(view)].count("Filled") == 1
    assert {index.row() for index in view.table.selectedIndexes()} == {row_of(view, "Filled")}, before


def test_operator_sees_the_text_and_tokens_of_a_block(engine, shared_session, show_inspector, poll, qtbot):
    view = show_inspector(shared_session)
    shared_session.selection.select_block(20)
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=120_000)
    question = engine.source.sent[0]
    assert isinstance(question, GetBlockText)
    content = BlockContent(block=20, start=16, token_ids=(4, 5), text=" blue\nsky", notes=(("LoRA", "sql"),))
    engine.source.replies.append(BlockText(contents=(content,), tag=question.tag))
    poll(shared_session)
    assert ("Text", " blue⏎\nsky") in shown_facts(view)
    assert ("Tokens", "16 to 17") in shown_facts(view)
    assert ("LoRA", "sql") in shown_facts(view)
    assert ("Token ids", "4 5") in shown_facts(view)


def test_text_of_a_past_block_is_not_requested(engine, shared_session, show_inspector, poll, qtbot):
    shared_session.timeline.pause()
    engine.write_blocks([20], owner=9, filled=11)
    poll(shared_session)
    show_inspector(shared_session)
    shared_session.selection.select_block(20)
    qtbot.wait(120)  # longer than the pause between questions
    assert engine.source.sent == []


def test_unknown_request_shows_a_message(shared_session, show_inspector):
    view = show_inspector(shared_session)
    shared_session.selection.select_request(77)
    assert "Nothing is known about this request" in view.empty_label.text()


def test_step_page_shows_counts_and_that_requests_need_a_pause(engine, session, show_inspector, poll):
    engine.frame((), counters=Counters(num_running=3, num_waiting=1))
    poll(session)
    view = show_inspector(session)
    view.show_subject(STEP)
    engine.write_blocks([1, 2], counters=Counters(num_running=4))
    poll(session)
    view.refresh()
    facts = dict(shown_facts(view))
    assert facts["Running"] == "4 requests"
    assert facts["Requests run"].startswith("pause (Space) to list them")
    assert view.heading.text() == f"Step {session.mirror.step}"


def test_narrow_inspector_fits_in_the_light_theme(shared_session, show_inspector):
    view = show_inspector(shared_session, size=(300, 600))
    shared_session.selection.select_block(7)
    view.apply_theme(LIGHT)
    assert view.minimumSizeHint().width() <= 300
    assert view.table.columnWidth(0) + view.table.columnWidth(1) == view.table.viewport().width()


def test_block_of_a_large_pool_is_described(make_engine, make_session, show_inspector, poll):
    engine = make_engine(num_blocks=1_000_000)
    session = make_session(engine)
    engine.request(1, blocks=list(range(500_000, 500_100)))
    engine.write_blocks(np.arange(500_000, 500_100), owner=1)
    poll(session)
    view = show_inspector(session)
    session.selection.select_block(500_050)
    assert ("Request #1", "51 of 100 blocks, tokens 800 to 815") in shown_facts(view)
    assert int(session.mirror.ledger.state[500_050]) == BlockState.ACTIVE


@pytest.mark.parametrize("width", [220, 280, 360, 600])
def test_inspector_rows_are_high_enough_for_wrapped_values(qtbot, width):
    table = FactTable()
    qtbot.addWidget(table)
    values = ["short", "15 blocks, 10.5 MiB, 240 of 240 slots filled", "needed 3 blocks and none was free", "a " * 40]
    table.resize(width, 400)
    table.show()
    table.show_page(page("Request", ("Facts", [Fact(f"fact {at}", value) for at, value in enumerate(values)])))
    QApplication.processEvents()
    larger = table.font()
    larger.setPointSizeF(1.75 * larger.pointSizeF())  # as the zoom does
    table.setFont(larger)
    for row in range(table.facts.rowCount()):
        assert table.rowHeight(row) >= table.sizeHintForRow(row) or table.facts.fact_at(row) is None


def test_request_page_lists_its_blocks_per_kv_group(engine, make_session, show_inspector, poll):
    groups = (KVGroup(kind="full"), KVGroup(kind="window", window=40))
    cache = msgspec.structs.replace(engine.hello.cache, groups=groups, num_reserved_blocks=1)
    state = CacheState(msgspec.structs.replace(engine.hello, cache=cache))
    request = state.add_request("a", num_prompt_tokens=70)
    request.num_cached_tokens, request.state = 48, RequestState.RUNNING
    request.set_table([3, 4, 5, 6, 7])
    request.set_table([0, 0, 9, 10, 11], group=1)
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=state.snapshot()))
    session = make_session(engine)
    poll(session)
    session.selection.select_request(1)
    facts = dict(shown_facts(show_inspector(session)))
    assert facts["Holds"] == "Request #1: 8 blocks, 2.81 MiB, 0 of 128 slots filled"
    assert (facts["First block"], facts["Last block"]) == ("Block 3", "Block 7")
    assert facts["KV group 0"] == "full attention: 5 blocks; 3 found in the cache"
    assert facts["KV group 1"] == "sliding window of 40: 3 blocks, 2 released; 1 found in the cache"


def test_block_of_a_sliding_window_shows_its_position_in_the_group_table(engine, make_session, show_inspector, poll):
    groups = (KVGroup(kind="full"), KVGroup(kind="window", window=40))
    cache = msgspec.structs.replace(engine.hello.cache, groups=groups, num_reserved_blocks=1)
    state = CacheState(msgspec.structs.replace(engine.hello, cache=cache))
    request = state.add_request("a", num_prompt_tokens=70)
    request.set_table([3, 4, 5, 6, 7])
    request.set_table([0, 0, 9, 10], group=1)
    state.set_blocks([9, 10], state=BlockState.ACTIVE, ref_count=1, owner=1, group=1, filled=16)
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=state.snapshot()))
    session = make_session(engine)
    poll(session)
    session.selection.select_block(9)
    facts = dict(shown_facts(show_inspector(session)))
    assert facts["Request #1"] == "3 of 4 blocks, tokens 32 to 47"
    assert "Previous block" not in facts, "the previous block was freed"
    assert facts["Next block"].startswith("Block 10")

"""Tests of the chat page: versions of turns, drafts, conversations, and the engine state shown with an answer."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QContextMenuEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QLineEdit, QMenu
from tests.app import window_driver as driver

from kvscope_app.views.console.conversation_picker import date_text
from kvscope_telemetry.messages.commands import Abort, Refused
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.source import SourceState

ENTER, ESCAPE = Qt.Key.Key_Return, Qt.Key.Key_Escape


@pytest.fixture
def undo_entries(console):
    """Undo entries that the view reported, as (text, undo, redo)."""
    done = []
    console.view.done.connect(lambda words, back, again: done.append((words, back, again)))
    return done


@pytest.fixture
def window_escape_runs(console):
    """Shortcut of the window on Esc; the returned list grows with each run."""
    runs = []
    action = QAction(console.view)
    action.setShortcut(QKeySequence(ESCAPE))
    action.triggered.connect(lambda: runs.append(1))
    console.view.addAction(action)
    return runs


def press_escape(console, qtbot):
    edit = console.page.composer.edit
    edit.setFocus()
    qtbot.waitUntil(edit.hasFocus)
    qtbot.keyClick(edit, ESCAPE)


def test_regenerated_answer_keeps_the_old_one_and_its_later_turns(console, undo_entries):
    for number in ("1", "2", "3"):
        console.ask(f"prompt {number}", f"answer {number}")
    console.page.transcript.cards[1].redo.click()
    console.token("other")
    console.finish()
    assert console.texts == ["prompt 1", "other"]
    assert driver.visible_text(console.card).count("2/2") == 1
    console.card.versions.previous.click()
    assert console.texts == ["prompt 1", "answer 1", "prompt 2", "answer 2", "prompt 3", "answer 3"]
    console.page.transcript.cards[1].versions.next.click()
    assert console.texts == ["prompt 1", "other"]
    ((words, back, again),) = undo_entries
    assert words == "regenerating an answer"
    back()
    assert console.texts[-1] == "answer 3"
    again()
    assert console.texts == ["prompt 1", "other"]


def test_edited_prompt_becomes_a_version_and_can_be_undone(console, undo_entries, qtbot):
    console.ask("One", "re One")
    console.ask("Two", "re Two")
    console.page.transcript.cards[0].redo.click()
    console.ask("Uno", "re Uno")
    assert console.texts == ["Uno", "re Uno"]
    assert [m.content for m in console.submits[-1].messages] == ["Uno"]
    undo_entries[-1][1]()
    assert console.texts == ["One", "re One", "Two", "re Two"]
    console.ask("Three", "re Three")
    assert [m.content for m in console.submits[-1].messages] == ["One", "re One", "Two", "re Two", "Three"]


def test_old_versions_of_a_regenerated_answer_can_be_shown_after_a_restart(console, make_console):
    console.ask("One", "first")
    console.card.redo.click()
    console.token("second")
    console.finish()
    console.view.shut_down()
    again = make_console()
    assert again.texts == ["One", "second"]
    again.card.versions.previous.click()
    assert again.texts == ["One", "first"]


def test_undo_while_an_answer_is_regenerated_aborts_it(console, undo_entries):
    console.ask("One", "first")
    console.card.redo.click()
    console.token("sec")
    undo_entries[-1][1]()
    assert console.texts == ["One", "first"]
    assert console.engine.source.sent[-1] == Abort(request_id=console.request_id)
    console.token("ond")
    console.finish("abort")
    assert console.texts == ["One", "first"]
    console.card.versions.next.click()
    assert console.texts == ["One", "second"]


def test_answer_cannot_be_regenerated_after_the_engine_ended(console):
    console.ask("One")
    console.token("half an ans")
    console.engine.set_status(SourceState.ENDED, "killed by signal 9")
    console.session.poll()
    console.chat.flush()
    assert not console.card.redo.isEnabled()
    console.page.transcript.regenerate_requested.emit(console.card.message)
    assert len(console.submits) == 1
    assert console.texts == ["One", "half an ans"]


def test_escape_cancels_an_edit_and_restores_the_draft(console, qtbot, window_escape_runs):
    console.ask("One", "re One")
    console.page.composer.set_text("a draft")
    console.page.transcript.cards[0].redo.click()
    assert console.page.composer.edit.toPlainText() == "One"
    press_escape(console, qtbot)
    assert console.page.composer.edit.toPlainText() == "a draft"
    assert not console.page.cancel_edit.isVisible()
    assert window_escape_runs == []
    press_escape(console, qtbot)
    assert window_escape_runs == [1]


def test_cancel_button_cancels_an_edit(console):
    console.ask("One", "re One")
    console.page.transcript.cards[0].redo.click()
    console.page.cancel_edit.click()
    assert console.page.composer.edit.toPlainText() == ""
    console.ask("Two", "re Two")
    assert console.texts == ["One", "re One", "Two", "re Two"]


def test_sent_edit_leaves_the_draft_in_the_composer(console):
    console.ask("One", "re One")
    console.page.composer.set_text("a draft")
    console.page.transcript.cards[0].redo.click()
    console.ask("Uno")
    assert console.page.composer.edit.toPlainText() == "a draft"


def test_edits_and_drafts_stay_in_their_conversation(console):
    console.ask("in A", "re A")
    console.page.composer.set_text("draft A")
    console.page.transcript.cards[0].redo.click()
    console.page.new_conversation()
    assert console.page.composer.edit.toPlainText() == ""
    assert not console.page.cancel_edit.isVisible()
    console.ask("in B", "re B")
    assert console.texts == ["in B", "re B"]
    console.page.composer.set_text("draft B")
    console.page.show_row(1)
    assert console.page.composer.edit.toPlainText() == "in A"
    assert console.page.cancel_edit.isVisible()
    console.page.cancel_edit.click()
    assert console.page.composer.edit.toPlainText() == "draft A"
    console.page.show_row(0)
    assert console.page.composer.edit.toPlainText() == "draft B"


def test_drafts_and_edits_are_restored_after_a_kill(console, make_console, monkeypatch, qtbot):
    console.ask("in A", "re A")
    console.page.composer.set_text("draft A")
    console.page.transcript.cards[0].redo.click()
    console.page.composer.set_text("in A, edited")
    console.page.new_conversation()
    console.page.composer.set_text("never sent")
    console.chat.save()  # as the timer does; a killed process saves nothing at its end
    again = make_console()
    assert again.page.composer.edit.toPlainText() == "never sent"
    again.page.show_row(1)
    assert again.page.composer.edit.toPlainText() == "in A, edited"
    again.page.cancel_edit.click()
    assert again.page.composer.edit.toPlainText() == "draft A"


def test_sent_prompt_leaves_no_draft_behind(console, make_console):
    console.page.composer.set_text("Hello")
    console.chat.save()
    console.page.composer.button.click()
    console.finish()
    console.chat.save()
    assert make_console().page.composer.edit.toPlainText() == ""


def test_undo_shortcut_goes_to_the_window_if_the_composer_has_nothing_to_undo(console, qtbot):
    runs = []
    action = QAction(console.view)
    action.setShortcut(QKeySequence("Ctrl+Z"))
    action.triggered.connect(lambda: runs.append(1))
    console.view.addAction(action)
    edit = console.page.composer.edit
    edit.setFocus()
    qtbot.waitUntil(edit.hasFocus)
    qtbot.keyClicks(edit, "abc")
    qtbot.keyClick(edit, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert (edit.toPlainText(), runs) == ("", [])
    qtbot.keyClick(edit, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert runs == [1]


def test_escape_aborts_the_answer_and_keeps_the_selection(console, qtbot, window_escape_runs):
    console.ask("Long story")
    console.token("Once")
    press_escape(console, qtbot)
    assert console.engine.source.sent[-1] == Abort(request_id=console.request_id)
    assert window_escape_runs == []


def test_enter_while_an_answer_is_written_explains_why_nothing_is_sent(console, qtbot):
    console.ask("Long story")
    console.page.composer.set_text("next")
    qtbot.keyClick(console.page.composer.edit, ENTER)
    assert "An answer is being written" in console.page.notice.text()
    assert console.page.notice.isVisible()
    assert console.page.composer.edit.toPlainText() == "next"
    console.finish()
    assert not console.page.notice.isVisible()
    qtbot.keyClick(console.page.composer.edit, ENTER)
    assert len(console.submits) == 2


def test_late_click_on_stop_does_not_send_the_draft(console, qtbot):
    console.ask("Long story")
    console.page.composer.set_text("next")
    composer = console.page.composer
    place = composer.stop.geometry().center()
    console.finish()
    qtbot.waitUntil(lambda: composer.stop.isHidden() and composer.childAt(place) is not None)
    qtbot.mouseClick(composer.childAt(place), Qt.MouseButton.LeftButton)
    assert len(console.submits) == 1
    assert composer.edit.toPlainText() == "next"


def test_delete_in_the_menu_of_a_conversation_deletes_that_one_and_not_the_open_one(console):
    console.ask("first", "re first")
    console.page.new_conversation()
    console.ask("second", "re second")
    menu = console.page.list.menu_of(1)
    next(action for action in menu.actions() if action.text() == "Delete").trigger()
    menu.close()
    assert [c.title for c in console.chat.conversations] == ["second"]
    assert console.texts == ["second", "re second"]
    console.page.undo.click()
    assert {c.title for c in console.chat.conversations} == {"first", "second"}


def test_right_click_in_the_list_opens_the_menu_of_the_row_under_the_mouse(console, qtbot, monkeypatch):
    opened = []
    monkeypatch.setattr(QMenu, "popup", lambda menu, _point: opened.append(menu))
    console.view.resize(900, 560)
    console.ask("first", "re first")
    console.page.new_conversation()
    console.ask("second", "re second")
    listed = console.page.list
    qtbot.waitUntil(lambda: listed.visualRect(listed.model().index(1, 0)).isValid())
    point = listed.visualRect(listed.model().index(1, 0)).center()
    place = listed.viewport().mapToGlobal(point)
    QApplication.sendEvent(listed.viewport(), QContextMenuEvent(QContextMenuEvent.Reason.Mouse, point, place))
    (menu,) = opened
    next(action for action in menu.actions() if action.text() == "Rename").trigger()
    assert driver.only_child(listed, QLineEdit).text() == "first"


def test_rename_keeps_the_open_title_editor_in_the_list(console):
    console.view.resize(900, 560)
    console.ask("first", "re first")
    listed = console.page.list
    console.page.rename()
    driver.only_child(listed, QLineEdit).setText("kept")
    console.page.rename()
    menu = listed.menu_of(0)
    next(action for action in menu.actions() if action.text() == "Rename").trigger()
    menu.close()
    assert driver.only_child(listed, QLineEdit).text() == "kept"


def test_undo_removes_the_notice_of_the_deletion(console, undo_entries):
    console.ask("first", "re first")
    console.page.head.remove.click()
    assert console.page.undo.isVisible()
    undo_entries[-1][1]()
    assert console.texts == ["first", "re first"]
    assert not console.page.undo.isVisible()
    assert not console.page.notice.isVisible()


def test_focus_is_in_the_composer_after_renaming_and_deleting(console, qtbot):
    console.ask("first", "re first")
    for last_key in (ENTER, ESCAPE):
        console.page.head.rename.click()
        qtbot.waitUntil(console.page.head.title_line.hasFocus)
        qtbot.keyClick(console.page.head.title_line, last_key)
        assert console.page.composer.edit.hasFocus()
        assert not console.page.head.title_line.isVisible()
    console.page.head.remove.setFocus()
    console.page.head.remove.click()
    assert console.page.composer.edit.hasFocus()


def test_switching_conversations_changes_the_selected_request_unless_chosen_elsewhere(console):
    console.ask("first")
    console.accept(3)
    console.finish()
    console.page.new_conversation()
    assert console.session.selection.request is None
    console.ask("second")
    console.accept(4)
    console.finish()
    console.page.show_row(1)
    assert console.session.selection.request == 3
    console.session.selection.select_request(99)  # selected in another view
    console.page.show_row(0)
    assert console.session.selection.request == 99


def test_refused_turn_is_marked_and_left_out_of_later_prompts(console):
    console.ask("too long")
    console.reply(Refused(request_id=console.request_id, reason="the prompt has 8206 tokens: send at most 8191"))
    prompt, answer = console.page.transcript.cards
    assert prompt.role_label.text() == "You  ·  left out of later prompts"
    assert answer.notice.text() == (
        "Not accepted: the prompt has 8\u202f206 tokens: send at most 8\u202f191.  Later prompts leave this turn out"
    )
    console.ask("short", "fine")
    assert [m.content for m in console.submits[-1].messages] == ["short"]
    assert console.page.transcript.cards[2].role_label.text() == "You"


def test_context_size_excludes_aborted_turns(console):
    console.ask("first", "re first")
    console.view.refresh()
    before = console.page.context.text.text()
    console.ask("second")
    console.accept(9)
    console.finish("abort")
    console.view.refresh()
    assert console.page.context.text.text() == before == "15 context tokens"


def test_final_tokens_per_second_of_an_answer_exclude_time_with_a_paused_engine(console):
    console.ask("x")
    console.token("a")
    console.finish(stopped_s=8.0)
    assert "2 tok/s" in console.card.stats.text()
    assert console.card.stats.text().endswith("9.75 s in total, 8.00 s of it paused")


def test_tokens_per_second_of_an_unfinished_answer_exclude_time_with_a_paused_engine(console, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("kvscope_app.views.console.chat_answer.time.monotonic", lambda: now_s[0])
    console.ask("x")
    console.token("a")
    engine, ms = console.engine, 1_000_000
    engine.step = 1_000
    engine.event(kind="engine_paused")
    engine.step = 9_000
    engine.event(kind="engine_resumed")
    console.session.poll()
    console.session.poll()
    assert console.session.live_mirror.stops.stopped_ns(0, 10_000 * ms) == 8_000 * ms
    now_s[0] += 10.0
    console.token("b")
    assert console.chat.answers_of(console.page.current.key)[0].message.stats.tokens_per_s == pytest.approx(
        0.5, rel=0.01
    )


def test_waiting_answer_states_that_the_engine_is_paused(console):
    console.ask("x")
    console.accept()
    console.engine.set_status(SourceState.PAUSED)
    console.session.poll()
    console.view.refresh()
    assert console.card.notice.text().startswith("The engine is paused: choose Resume engine in the Debug menu")
    console.engine.set_live()
    console.session.poll()
    console.token("a")
    console.view.refresh()
    assert not console.card.notice.isVisible()


def test_waiting_answer_shows_the_prefill_progress(console):
    console.ask("x")
    console.accept(3)
    console.engine.request(3, num_prompt_tokens=8_136, num_output_tokens=0)
    console.session.poll()
    requests = console.session.live_mirror.requests
    requests.num_computed_tokens[0], requests.num_cached_tokens[0] = 1_302, 240
    console.view.refresh()
    assert console.card.notice.text().startswith(
        "Prefill 16 %: 1\u202f302 of 8\u202f136 prompt tokens, 240 of them cached"
    )
    console.engine.set_status(SourceState.STUCK, "step 3 has not finished for 6 s")
    console.session.poll()
    console.view.refresh()
    assert console.card.notice.text().endswith("240 of them cached; step 3 has not finished for 6 s")


def test_waiting_answer_states_what_it_waits_for(console):
    console.ask("x")
    console.accept(3)
    console.engine.request(3, state=0, num_output_tokens=0)
    console.session.poll()
    console.session.live_mirror.requests.waits_for[0] = WaitsFor.GRAMMAR
    console.view.refresh()
    assert console.card.notice.text().startswith("Waiting: the grammar of its answer is being compiled")


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [(4, "Token limit reached: Max tokens is 4"), (512, "Token limit reached: the context is full (15 tokens)")],
)
def test_answer_states_which_token_limit_was_reached(console, max_tokens, text):
    console.page.current.sampling = replace(console.page.current.sampling, max_tokens=max_tokens)
    console.ask("x")
    console.token("a")
    console.finish("length")
    assert console.card.notice.text() == text


def test_context_shows_remaining_tokens_if_the_answer_may_be_truncated(console):
    context = console.page.context
    context.show_fill(8_136, 8_192, 512)
    assert context.text.text().endswith("8\u202f192 context tokens, 56 left")
    assert "a longer answer is cut" in context.text.toolTip()
    context.show_fill(100, 8_192, 512)
    assert "left" not in context.text.text()


def test_reasoning_is_folded_when_the_answer_begins(console, qtbot):
    console.ask("x")
    console.token("<think>\nLet me")
    assert console.card.reasoning.toPlainText() == "Let me"
    qtbot.waitUntil(console.card.reasoning.isVisible)
    console.token(" see\n</think>\n\n**Yes**")
    assert console.card.body.toPlainText() == "Yes"
    assert not console.card.reasoning.isVisible()
    console.finish()
    assert console.card.body.toPlainText() == "Yes"
    console.card.reasoning_toggle.click()
    assert console.card.reasoning.isVisible()
    assert console.card.reasoning.toPlainText() == "Let me see"


def test_conversation_list_popup_is_as_wide_as_its_titles(console):
    console.ask("A question whose first words make a rather long title", "re")
    combo = console.page.combo
    combo.resize(160, combo.height())
    title = combo.fontMetrics().horizontalAdvance(console.page.current.title)
    assert combo.popup_width > title > 160


def test_date_text_is_relative_within_a_week():
    now = time.mktime((2026, 11, 29, 16, 5, 0, 0, 0, -1))
    assert date_text(now, now) == "16:05"
    assert date_text(now - 86_400, now) == "Yesterday"
    assert date_text(now - 3 * 86_400, now) == "Thursday"
    assert date_text(now - 7 * 86_400, now) == "2026-11-22"

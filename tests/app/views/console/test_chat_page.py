"""The chat keeps what is replaced, belongs to its conversation, and says what the engine is doing."""

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
def undo(talk):
    """What the window does with actions that can be undone."""
    done = []
    talk.view.done.connect(lambda words, back, again: done.append((words, back, again)))
    return done


@pytest.fixture
def window_escape(talk):
    """The window's own shortcut on Esc; how often it was run."""
    runs = []
    action = QAction(talk.view)
    action.setShortcut(QKeySequence(ESCAPE))
    action.triggered.connect(lambda: runs.append(1))
    talk.view.addAction(action)
    return runs


def press_escape(talk, qtbot):
    edit = talk.page.composer.edit
    edit.setFocus()
    qtbot.waitUntil(edit.hasFocus)
    qtbot.keyClick(edit, ESCAPE)


def test_regenerated_answer_keeps_the_old_one_and_all_turns_after_it(talk, undo):
    for number in ("1", "2", "3"):
        talk.ask(f"prompt {number}", f"answer {number}")
    talk.page.transcript.cards[1].redo.click()
    talk.token("other")
    talk.finish()
    assert talk.texts == ["prompt 1", "other"]
    assert driver.text(talk.card).count("2/2") == 1
    talk.card.previous.click()
    assert talk.texts == ["prompt 1", "answer 1", "prompt 2", "answer 2", "prompt 3", "answer 3"]
    talk.page.transcript.cards[1].next.click()
    assert talk.texts == ["prompt 1", "other"]
    ((words, back, again),) = undo
    assert words == "regenerating an answer"
    back()
    assert talk.texts[-1] == "answer 3"
    again()
    assert talk.texts == ["prompt 1", "other"]


def test_edited_prompt_is_a_version_beside_the_old_one_and_can_be_undone(talk, undo, qtbot):
    talk.ask("One", "re One")
    talk.ask("Two", "re Two")
    talk.page.transcript.cards[0].redo.click()
    talk.ask("Uno", "re Uno")
    assert talk.texts == ["Uno", "re Uno"]
    assert [m.content for m in talk.submits[-1].messages] == ["Uno"]
    undo[-1][1]()
    assert talk.texts == ["One", "re One", "Two", "re Two"]
    talk.ask("Three", "re Three")
    assert [m.content for m in talk.submits[-1].messages] == ["One", "re One", "Two", "re Two", "Three"]


def test_versions_survive_a_restart(talk, make_talk):
    talk.ask("One", "first")
    talk.card.redo.click()
    talk.token("second")
    talk.finish()
    talk.view.shut_down()
    again = make_talk()
    assert again.texts == ["One", "second"]
    again.card.previous.click()
    assert again.texts == ["One", "first"]


def test_undone_while_it_is_written_stops_the_new_answer(talk, undo):
    talk.ask("One", "first")
    talk.card.redo.click()
    talk.token("sec")
    undo[-1][1]()
    assert talk.texts == ["One", "first"]
    assert talk.engine.source.sent[-1] == Abort(request_id=talk.request_id)
    talk.token("ond")
    talk.finish("abort")
    assert talk.texts == ["One", "first"]
    talk.card.next.click()
    assert talk.texts == ["One", "second"]


def test_nothing_is_regenerated_while_the_engine_is_dead(talk):
    talk.ask("One")
    talk.token("half an ans")
    talk.engine.say(SourceState.ENDED, "killed by signal 9")
    talk.session.poll()
    talk.chat.flush()
    assert not talk.card.redo.isEnabled()
    talk.page.transcript.again_wanted.emit(talk.card.message)
    assert len(talk.submits) == 1
    assert talk.texts == ["One", "half an ans"]


def test_escape_cancels_an_edit_and_brings_back_the_draft(talk, qtbot, window_escape):
    talk.ask("One", "re One")
    talk.page.composer.set_text("a draft")
    talk.page.transcript.cards[0].redo.click()
    assert talk.page.composer.edit.toPlainText() == "One"
    press_escape(talk, qtbot)
    assert talk.page.composer.edit.toPlainText() == "a draft"
    assert not talk.page.cancel_edit.isVisible()
    assert window_escape == []
    press_escape(talk, qtbot)
    assert window_escape == [1]


def test_cancel_button_cancels_an_edit(talk):
    talk.ask("One", "re One")
    talk.page.transcript.cards[0].redo.click()
    talk.page.cancel_edit.click()
    assert talk.page.composer.edit.toPlainText() == ""
    talk.ask("Two", "re Two")
    assert talk.texts == ["One", "re One", "Two", "re Two"]


def test_sent_edit_leaves_the_draft_in_the_composer(talk):
    talk.ask("One", "re One")
    talk.page.composer.set_text("a draft")
    talk.page.transcript.cards[0].redo.click()
    talk.ask("Uno")
    assert talk.page.composer.edit.toPlainText() == "a draft"


def test_edit_and_draft_stay_in_their_conversation(talk):
    talk.ask("in A", "re A")
    talk.page.composer.set_text("draft A")
    talk.page.transcript.cards[0].redo.click()
    talk.page.new_conversation()
    assert talk.page.composer.edit.toPlainText() == ""
    assert not talk.page.cancel_edit.isVisible()
    talk.ask("in B", "re B")
    assert talk.texts == ["in B", "re B"]
    talk.page.composer.set_text("draft B")
    talk.page.show_row(1)
    assert talk.page.composer.edit.toPlainText() == "in A"
    assert talk.page.cancel_edit.isVisible()
    talk.page.cancel_edit.click()
    assert talk.page.composer.edit.toPlainText() == "draft A"
    talk.page.show_row(0)
    assert talk.page.composer.edit.toPlainText() == "draft B"


def test_drafts_and_edits_survive_a_kill(talk, make_talk, monkeypatch, qtbot):
    talk.ask("in A", "re A")
    talk.page.composer.set_text("draft A")
    talk.page.transcript.cards[0].redo.click()
    talk.page.composer.set_text("in A, edited")
    talk.page.new_conversation()
    talk.page.composer.set_text("never sent")
    talk.chat.save()  # as the timer does; nothing else runs when the process is killed
    again = make_talk()
    assert again.page.composer.edit.toPlainText() == "never sent"
    again.page.show_row(1)
    assert again.page.composer.edit.toPlainText() == "in A, edited"
    again.page.cancel_edit.click()
    assert again.page.composer.edit.toPlainText() == "draft A"


def test_sent_prompt_leaves_no_draft_behind(talk, make_talk):
    talk.page.composer.set_text("Hello")
    talk.chat.save()
    talk.page.composer.button.click()
    talk.finish()
    talk.chat.save()
    assert make_talk().page.composer.edit.toPlainText() == ""


def test_undo_key_is_the_windows_where_the_composer_has_nothing_to_undo(talk, qtbot):
    runs = []
    action = QAction(talk.view)
    action.setShortcut(QKeySequence("Ctrl+Z"))
    action.triggered.connect(lambda: runs.append(1))
    talk.view.addAction(action)
    edit = talk.page.composer.edit
    edit.setFocus()
    qtbot.waitUntil(edit.hasFocus)
    qtbot.keyClicks(edit, "abc")
    qtbot.keyClick(edit, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert (edit.toPlainText(), runs) == ("", [])
    qtbot.keyClick(edit, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert runs == [1]


def test_escape_stops_the_answer_and_not_the_windows_selection(talk, qtbot, window_escape):
    talk.ask("Long story")
    talk.token("Once")
    press_escape(talk, qtbot)
    assert talk.engine.source.sent[-1] == Abort(request_id=talk.request_id)
    assert window_escape == []


def test_enter_while_an_answer_is_written_says_why_nothing_is_sent(talk, qtbot):
    talk.ask("Long story")
    talk.page.composer.set_text("next")
    qtbot.keyClick(talk.page.composer.edit, ENTER)
    assert "An answer is being written" in talk.page.notice.text()
    assert talk.page.notice.isVisible()
    assert talk.page.composer.edit.toPlainText() == "next"
    talk.finish()
    assert not talk.page.notice.isVisible()
    qtbot.keyClick(talk.page.composer.edit, ENTER)
    assert len(talk.submits) == 2


def test_late_click_on_stop_does_not_send_the_draft(talk, qtbot):
    talk.ask("Long story")
    talk.page.composer.set_text("next")
    composer = talk.page.composer
    place = composer.stop.geometry().center()
    talk.finish()
    qtbot.waitUntil(lambda: composer.stop.isHidden() and composer.childAt(place) is not None)
    qtbot.mouseClick(composer.childAt(place), Qt.MouseButton.LeftButton)
    assert len(talk.submits) == 1
    assert composer.edit.toPlainText() == "next"


def test_context_menu_of_the_list_acts_on_the_row_under_the_mouse(talk):
    talk.ask("first", "re first")
    talk.page.new_conversation()
    talk.ask("second", "re second")
    menu = talk.page.list.menu_of(1)
    next(action for action in menu.actions() if action.text() == "Delete").trigger()
    menu.close()
    assert [c.title for c in talk.chat.conversations] == ["second"]
    assert talk.texts == ["second", "re second"]
    talk.page.undo.click()
    assert {c.title for c in talk.chat.conversations} == {"first", "second"}


def test_right_click_in_the_list_opens_the_menu_of_the_row_under_the_mouse(talk, qtbot, monkeypatch):
    opened = []
    monkeypatch.setattr(QMenu, "popup", lambda menu, _point: opened.append(menu))
    talk.view.resize(900, 560)
    talk.ask("first", "re first")
    talk.page.new_conversation()
    talk.ask("second", "re second")
    listed = talk.page.list
    qtbot.waitUntil(lambda: listed.visualRect(listed.model().index(1, 0)).isValid())
    point = listed.visualRect(listed.model().index(1, 0)).center()
    place = listed.viewport().mapToGlobal(point)
    QApplication.sendEvent(listed.viewport(), QContextMenuEvent(QContextMenuEvent.Reason.Mouse, point, place))
    (menu,) = opened
    next(action for action in menu.actions() if action.text() == "Rename").trigger()
    assert driver.only(listed, QLineEdit).text() == "first"


def test_rename_is_chosen_again_while_a_title_is_written_in_the_list(talk):
    talk.view.resize(900, 560)
    talk.ask("first", "re first")
    listed = talk.page.list
    talk.page.rename()
    driver.only(listed, QLineEdit).setText("kept")
    talk.page.rename()
    menu = listed.menu_of(0)
    next(action for action in menu.actions() if action.text() == "Rename").trigger()
    menu.close()
    assert driver.only(listed, QLineEdit).text() == "kept"


def test_undo_from_elsewhere_takes_the_notice_of_the_deletion_away(talk, undo):
    talk.ask("first", "re first")
    talk.page.head.remove.click()
    assert talk.page.undo.isVisible()
    undo[-1][1]()
    assert talk.texts == ["first", "re first"]
    assert not talk.page.undo.isVisible()
    assert not talk.page.notice.isVisible()


def test_focus_is_in_the_composer_after_renaming_and_deleting(talk, qtbot):
    talk.ask("first", "re first")
    for last_key in (ENTER, ESCAPE):
        talk.page.head.rename.click()
        qtbot.waitUntil(talk.page.head.title_line.hasFocus)
        qtbot.keyClick(talk.page.head.title_line, last_key)
        assert talk.page.composer.edit.hasFocus()
        assert not talk.page.head.title_line.isVisible()
    talk.page.head.remove.setFocus()
    talk.page.head.remove.click()
    assert talk.page.composer.edit.hasFocus()


def test_other_conversations_request_does_not_stay_selected(talk):
    talk.ask("first")
    talk.accept(3)
    talk.finish()
    talk.page.new_conversation()
    assert talk.session.selection.request is None
    talk.ask("second")
    talk.accept(4)
    talk.finish()
    talk.page.show_row(1)
    assert talk.session.selection.request == 3
    talk.session.selection.select_request(99)  # chosen elsewhere
    talk.page.show_row(0)
    assert talk.session.selection.request == 99


def test_turn_without_an_answer_is_marked_as_left_out(talk):
    talk.ask("too long")
    talk.reply(Refused(request_id=talk.request_id, reason="the prompt has 8206 tokens: at most 8191 are accepted"))
    prompt, answer = talk.page.transcript.cards
    assert prompt.who.text() == "You  ·  left out of later prompts"
    assert answer.notice.text() == (
        "Not accepted: the prompt has 8\u202f206 tokens: at most 8\u202f191 are accepted."
        "  Later prompts leave this turn out"
    )
    talk.ask("short", "fine")
    assert [m.content for m in talk.submits[-1].messages] == ["short"]
    assert talk.page.transcript.cards[2].who.text() == "You"


def test_context_does_not_count_a_turn_that_is_left_out(talk):
    talk.ask("first", "re first")
    talk.view.refresh()
    before = talk.page.context.text.text()
    talk.ask("second")
    talk.accept(9)
    talk.finish("abort")
    talk.view.refresh()
    assert talk.page.context.text.text() == before == "15 context tokens"


def test_speed_leaves_out_the_time_that_the_engine_was_paused(talk):
    talk.ask("x")
    talk.token("a")
    talk.finish(stopped_s=8.0)
    assert "2 tok/s" in talk.card.stats.text()
    assert talk.card.stats.text().endswith("9.75 s in total, 8.00 s of it paused")


def test_speed_while_writing_leaves_out_the_time_that_the_engine_was_paused(talk, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("kvscope_app.views.console.chat_answer.time.monotonic", lambda: now_s[0])
    talk.ask("x")
    talk.token("a")
    engine, ms = talk.engine, 1_000_000
    engine.step = 1_000
    engine.event(kind="engine_paused")
    engine.step = 9_000
    engine.event(kind="engine_resumed")
    talk.session.poll()
    talk.session.poll()
    assert talk.session.live_mirror.stops.stopped_ns(0, 10_000 * ms) == 8_000 * ms
    now_s[0] += 10.0
    talk.token("b")
    assert talk.chat.answer_of(talk.page.current.key).message.stats.tokens_per_s == pytest.approx(0.5, rel=0.01)


def test_paused_engine_is_named_where_the_answer_waits(talk):
    talk.ask("x")
    talk.accept()
    talk.engine.say(SourceState.PAUSED)
    talk.session.poll()
    talk.view.refresh()
    assert talk.card.notice.text().startswith("The engine is paused: choose Resume engine in the Debug menu")
    talk.engine.live()
    talk.session.poll()
    talk.token("a")
    talk.view.refresh()
    assert not talk.card.notice.isVisible()


def test_progress_of_the_prefill_is_shown(talk):
    talk.ask("x")
    talk.accept(3)
    talk.engine.request(3, num_prompt_tokens=8_136, num_output_tokens=0)
    talk.session.poll()
    requests = talk.session.live_mirror.requests
    requests.num_computed_tokens[0], requests.num_cached_tokens[0] = 1_302, 240
    talk.view.refresh()
    assert talk.card.notice.text().startswith(
        "Prefill 16 %: 1\u202f302 of 8\u202f136 prompt tokens, 240 of them cached"
    )
    talk.engine.say(SourceState.STUCK, "step 3 has not finished for 6 s")
    talk.session.poll()
    talk.view.refresh()
    assert talk.card.notice.text().endswith("240 of them cached; step 3 has not finished for 6 s")


def test_waiting_request_says_what_it_waits_for(talk):
    talk.ask("x")
    talk.accept(3)
    talk.engine.request(3, state=0, num_output_tokens=0)
    talk.session.poll()
    talk.session.live_mirror.requests.waits_for[0] = WaitsFor.GRAMMAR
    talk.view.refresh()
    assert talk.card.notice.text().startswith("Waiting: the grammar of its answer is being compiled")


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [(4, "Token limit reached: Max tokens is 4"), (512, "Token limit reached: the context is full (15 tokens)")],
)
def test_which_token_limit_was_reached_is_said(talk, max_tokens, text):
    talk.page.current.sampling = replace(talk.page.current.sampling, max_tokens=max_tokens)
    talk.ask("x")
    talk.token("a")
    talk.finish("length")
    assert talk.card.notice.text() == text


def test_context_says_what_is_left_when_the_answer_could_be_cut(talk):
    context = talk.page.context
    context.show_fill(8_136, 8_192, 512)
    assert context.text.text().endswith("8\u202f192 context tokens, 56 left")
    assert "a longer answer is cut" in context.text.toolTip()
    context.show_fill(100, 8_192, 512)
    assert "left" not in context.text.text()


def test_reasoning_is_folded_when_the_answer_begins(talk, qtbot):
    talk.ask("x")
    talk.token("<think>\nLet me")
    assert talk.card.reasoning.toPlainText() == "Let me"
    qtbot.waitUntil(talk.card.reasoning.isVisible)
    talk.token(" see\n</think>\n\n**Yes**")
    assert talk.card.body.toPlainText() == "**Yes**"
    assert not talk.card.reasoning.isVisible()
    talk.finish()
    assert talk.card.body.toPlainText() == "Yes"
    talk.card.fold.click()
    assert talk.card.reasoning.isVisible()
    assert talk.card.reasoning.toPlainText() == "Let me see"


def test_drop_down_of_conversations_is_as_wide_as_its_titles(talk):
    talk.ask("A question whose first words make a rather long title", "re")
    combo = talk.page.combo
    combo.resize(160, combo.height())
    title = combo.fontMetrics().horizontalAdvance(talk.page.current.title)
    assert combo.popup_width > title > 160


def test_conversations_say_when_they_were_changed():
    now = time.mktime((2026, 11, 29, 16, 5, 0, 0, 0, -1))
    assert date_text(now, now) == "16:05"
    assert date_text(now - 86_400, now) == "2026-11-28"

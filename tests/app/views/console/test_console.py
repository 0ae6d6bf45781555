"""The console: what a person types, sees, stops, and finds again."""

from __future__ import annotations

from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from tests.app import window_driver as driver

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.chat_page import StarterButton
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.conversation import Conversation, sampling_to_send
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    GetStatus,
    LoadedAdapter,
    Refused,
)
from kvscope_telemetry.messages.sampling_params import ModelSampling, SamplingParams
from kvscope_telemetry.source import SourceState, Update


def type_and_send(talk, qtbot, text):
    talk.page.composer.edit.setFocus()
    qtbot.keyClicks(talk.page.composer.edit, text)
    qtbot.keyClick(talk.page.composer.edit, Qt.Key.Key_Return)


def test_enter_sends_and_the_answer_streams_in(talk, qtbot):
    type_and_send(talk, qtbot, "Hello there")
    assert [m.content for m in talk.submits[0].messages] == ["Hello there"]
    assert talk.page.composer.edit.toPlainText() == ""
    assert talk.page.composer.stop.isVisible()
    talk.accept()
    assert talk.session.selection.request == 3
    assert talk.card.link.text() == "Request #3"
    talk.token("Good ")
    talk.token("**day**")
    assert talk.card.body.toPlainText() == "Good **day**"
    talk.view.refresh()
    assert "first seen after" in talk.card.stats.text()
    talk.finish()
    assert talk.card.body.toPlainText() == "Good day"
    assert talk.card.stats.text() == (
        "4 tokens  ·  2 tok/s  ·  first after 250 ms  ·  prompt 11 tokens, 8 cached  ·  1.75 s in total"
    )
    assert not talk.page.composer.stop.isVisible()
    assert talk.page.context.text.text() == "15 context tokens"


def test_the_next_turn_sends_all_that_was_said(talk, qtbot):
    type_and_send(talk, qtbot, "One")
    talk.token("Two")
    talk.finish()
    type_and_send(talk, qtbot, "Three")
    assert [m.role for m in talk.submits[-1].messages] == ["user", "assistant", "user"]


def test_shift_enter_makes_a_line_and_an_empty_prompt_is_not_sent(talk, qtbot):
    edit = talk.page.composer.edit
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    assert talk.submits == []
    height = edit.height()
    qtbot.keyClicks(edit, "a")
    qtbot.keyClick(edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(edit, "b")
    assert edit.toPlainText() == "a\nb"
    assert edit.height() > height


def test_up_brings_back_and_down_returns_but_own_text_is_left_alone(talk, qtbot):
    edit = talk.page.composer.edit
    for prompt in ("first", "second"):
        type_and_send(talk, qtbot, prompt)
        talk.finish()
    for key, shown in ((Qt.Key.Key_Up, "second"), (Qt.Key.Key_Up, "first"), (Qt.Key.Key_Down, "second")):
        qtbot.keyClick(edit, key)
        assert edit.toPlainText() == shown
    qtbot.keyClicks(edit, "!")
    qtbot.keyClick(edit, Qt.Key.Key_Up)
    assert edit.toPlainText() == "second!"


def test_stop_is_shown_as_stopped_only_when_the_engine_says_so(talk, qtbot):
    type_and_send(talk, qtbot, "Long story")
    talk.accept()
    talk.token("Once")
    qtbot.mouseClick(talk.page.composer.stop, Qt.MouseButton.LeftButton)
    assert talk.engine.source.sent[-1] == Abort(request_id=talk.request_id)
    assert talk.card.notice.text() == "Stopping…"
    assert not talk.page.composer.stop.isEnabled()
    talk.token(" upon")
    assert talk.card.notice.text() == "Stopping…"
    talk.finish("abort")
    assert talk.card.notice.text() == "Stopped"
    assert talk.card.message.content == "Once upon"
    assert not talk.page.composer.stop.isVisible()


def test_a_refusal_is_read_where_the_answer_would_be(talk, qtbot):
    type_and_send(talk, qtbot, "x")
    talk.reply(Refused(request_id=talk.request_id, reason="prompt has 9000 tokens, the model takes 8192"))
    assert talk.card.notice.text() == (
        "Not accepted: prompt has 9\u202f000 tokens, the model takes 8\u202f192.  Later prompts leave this turn out"
    )
    assert not talk.card.body.isVisible()
    assert not talk.page.composer.stop.isVisible()


def test_an_error_keeps_what_came(talk, qtbot):
    type_and_send(talk, qtbot, "x")
    talk.token("half")
    talk.finish("error", error="the forward pass failed")
    assert talk.card.notice.text() == "Failed: the forward pass failed"
    assert talk.card.body.toPlainText() == "half"


def test_an_engine_that_dies_leaves_the_part_that_came(talk, qtbot):
    type_and_send(talk, qtbot, "x")
    talk.token("half an ans")
    talk.engine.say(SourceState.ENDED, "killed by signal 9")
    talk.session.poll()
    talk.chat.flush()
    assert talk.card.message.ending == "interrupted"
    assert talk.card.notice.text() == "Interrupted: killed by signal 9"
    assert talk.card.body.toPlainText() == "half an ans"
    assert talk.page.composer.edit.placeholderText() == "The engine has stopped"
    qtbot.keyClicks(talk.page.composer.edit, "more")
    qtbot.keyClick(talk.page.composer.edit, Qt.Key.Key_Return)
    assert len(talk.submits) == 1
    assert talk.page.composer.edit.toPlainText() == "more"


def test_an_engine_that_was_replaced_does_not_answer_for_the_old_one(talk, qtbot, poll):
    type_and_send(talk, qtbot, "x")
    talk.accept()
    talk.engine.begin(epoch=8)
    poll(talk.session)
    talk.session.status_changed.emit()
    talk.chat.flush()
    assert talk.card.message.ending == "interrupted"
    talk.card.link.click()
    assert talk.page.notice.text() == "Request #3 is no longer known to the engine."


def test_the_link_tells_an_epoch_of_63_bits(talk, qtbot, poll):
    talk.engine.begin(epoch=4_812_049_538_478_226_247)
    poll(talk.session)
    talk.session.status_changed.emit()
    type_and_send(talk, qtbot, "x")
    talk.accept()
    with qtbot.waitSignal(talk.page.transcript.request_wanted) as signal:
        talk.card.link.click()
    assert signal.args == [4_812_049_538_478_226_247, 3]


def test_two_conversations_are_answered_at_once(talk, qtbot):
    type_and_send(talk, qtbot, "first")
    first = talk.request_id
    talk.page.new_conversation()
    type_and_send(talk, qtbot, "second")
    second = talk.request_id
    talk.token("aaa", first)
    talk.token("bbb", second)
    assert talk.card.body.toPlainText() == "bbb"
    talk.page.show_row(1)
    assert talk.page.current.title == "first"
    assert talk.card.body.toPlainText() == "aaa"
    talk.token("AAA", first)
    assert talk.card.body.toPlainText() == "aaaAAA"
    talk.finish("length", first)
    assert talk.chat.answer_of(talk.page.current.key) is None
    assert talk.page.combo.itemText(0) == "● second"


def test_again_writes_the_answer_anew(talk, qtbot):
    type_and_send(talk, qtbot, "Question")
    talk.token("bad")
    talk.finish()
    talk.card.redo.click()
    assert [m.content for m in talk.submits[-1].messages] == ["Question"]
    assert len(talk.page.current.path) == 2
    talk.token("good")
    assert talk.card.body.toPlainText() == "good"


def test_editing_a_prompt_replaces_what_follows_and_escape_keeps_it(talk, qtbot):
    for text in ("One", "Two"):
        type_and_send(talk, qtbot, text)
        talk.token(f"re {text}")
        talk.finish()
    talk.page.transcript.cards[0].redo.click()
    assert talk.page.composer.edit.toPlainText() == "One"
    qtbot.keyClick(talk.page.composer.edit, Qt.Key.Key_Escape)
    assert len(talk.page.current.path) == 4
    talk.page.transcript.cards[0].redo.click()
    type_and_send(talk, qtbot, " more")
    assert [m.content for m in talk.page.current.path] == ["One more", ""]


def test_copy_takes_the_source_text(talk, qtbot):
    type_and_send(talk, qtbot, "x")
    talk.token("**bold**")
    talk.finish()
    talk.card.copy.click()
    assert QGuiApplication.clipboard().text() == "**bold**"


def test_options_are_sent_and_kept_with_the_conversation(talk, qtbot):
    fields = talk.page.options.fields
    talk.page.head.settings.click()
    for name, text in (("temperature", "0,25"), ("seed", "42"), ("max_tokens", "")):
        fields[name].selectAll()
        qtbot.keyClicks(fields[name], text) if text else qtbot.keyClick(fields[name], Qt.Key.Key_Backspace)
    qtbot.keyClicks(talk.page.options.stop, "END|\\n\\n")
    talk.page.options.system.setPlainText("Be brief.")
    type_and_send(talk, qtbot, "x")
    sampling = talk.submits[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.25, 42, None)
    assert sampling.stop == ("END", "\n\n")
    assert talk.submits[-1].messages[0].content == "Be brief."
    talk.page.new_conversation()
    assert fields["seed"].text() == "42"
    talk.page.options.reset.click()
    assert (fields["temperature"].text(), fields["seed"].text()) == ("", "")


def test_empty_fields_show_and_send_what_the_models_makers_say(talk, qtbot):
    panel, makers = talk.page.options, ModelSampling(temperature=0.6, top_k=20)

    def shown():
        return [panel.fields[name].placeholderText() for name in ("temperature", "top_p", "top_k", "min_p")]

    assert shown() == ["0.7", "0.95", "0", "0"]
    type_and_send(talk, qtbot, "x")
    sampling = talk.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.95)
    panel.show_model(makers)
    assert shown() == ["0.6", "1", "20", "0"]
    assert "generation config" in panel.fields["temperature"].toolTip()
    conversation = Conversation(key="k", sampling=SamplingParams(top_p=1.0))
    sent = sampling_to_send(conversation, makers)
    assert (sent.temperature, sent.top_p, sent.top_k) == (None, 1.0, None)
    assert sent.resolved(makers).temperature == 0.6


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temperature", "-1", "temperature=-1.0 is not accepted: a number from 0 to 100"),
        ("temperature", "warm", "temperature='warm' is not accepted: a number from 0 to 100"),
        ("temperature", "nan", "temperature='nan' is not accepted: a number from 0 to 100"),
        ("top_p", "0", "top_p=0.0 is not accepted: a number above 0 and at most 1"),
        ("max_tokens", "1.5", "max_tokens='1.5' is not accepted: a whole number from 1 to 16777216"),
        ("top_k", "x", "top_k='x' is not accepted: a whole number from -1 to 2147483648"),
    ],
)
def test_what_is_not_accepted_is_said_and_not_sent(talk, qtbot, name, text, message):
    field = talk.page.options.fields[name]
    field.clear()
    qtbot.keyClicks(field, text)
    assert talk.page.options.error.text() == message
    assert talk.page.options.error.isVisible()
    type_and_send(talk, qtbot, "x")
    assert talk.submits == []
    talk.page.options.reset.click()
    assert not talk.page.options.error.isVisible()
    qtbot.keyClick(talk.page.composer.edit, Qt.Key.Key_Return)
    assert len(talk.submits) == 1


def test_history_is_kept_across_runs(talk, make_talk, qtbot):
    type_and_send(talk, qtbot, "Remember me")
    talk.token("always")
    talk.finish()
    talk.view.hide()
    again = make_talk()
    assert again.page.current.title == "Remember me"
    assert [card.body.toPlainText() for card in again.page.transcript.cards] == ["Remember me", "always"]
    assert "4 tokens" in again.card.stats.text()


def test_a_corrupt_file_is_told(make_talk, tmp_path):
    folder = tmp_path / "conversations"
    folder.mkdir()
    (folder / "x.json").write_text("{")
    talk = make_talk()
    assert "set aside as x.json.unreadable" in talk.page.notice.text()
    assert talk.page.notice.isVisible()


def test_renaming_and_deleting_with_undo(talk, qtbot, tmp_path):
    type_and_send(talk, qtbot, "Old name")
    talk.token("text")
    talk.finish()
    talk.page.head.rename.click()
    talk.page.head.title_line.clear()
    qtbot.keyClicks(talk.page.head.title_line, "New name")
    qtbot.keyClick(talk.page.head.title_line, Qt.Key.Key_Return)
    assert talk.page.combo.currentText() == "New name"
    talk.chat.save()
    talk.page.head.remove.click()
    assert ConversationStore(tmp_path / "conversations").load().conversations == []
    assert talk.page.starters.isVisible()
    talk.page.undo.click()
    assert talk.page.current.title == "New name"
    talk.chat.save()
    assert len(ConversationStore(tmp_path / "conversations").load().conversations) == 1


def test_deleting_stops_the_engine(talk, qtbot):
    type_and_send(talk, qtbot, "x")
    talk.page.head.remove.click()
    assert talk.engine.source.sent[-1] == Abort(request_id=talk.request_id)
    talk.token("late")
    talk.finish("abort")


def test_the_list_stands_beside_where_there_is_room(talk):
    assert not talk.page.list.isVisible()
    talk.view.resize(900, 500)
    assert talk.page.list.isVisible()
    assert not talk.page.combo.isVisible()


@pytest.mark.parametrize("state", [SourceState.CONNECTING, SourceState.LOADING])
def test_nothing_is_sent_before_the_engine_is_ready(talk, qtbot, state):
    talk.engine.say(state)
    talk.session.poll()
    type_and_send(talk, qtbot, "early")
    assert talk.submits == []
    assert talk.page.composer.edit.toPlainText() == "early"
    assert talk.page.notice.text() == talk.page.why_blocked() != ""
    talk.engine.live()
    talk.session.poll()
    assert not talk.page.notice.isVisible()


def test_why_nothing_can_be_sent_is_read_whole_where_it_is_narrow(qtbot):
    composer = Composer()
    qtbot.addWidget(composer)
    composer.resize(300, 100)
    composer.show()
    one_line = composer.edit.height()
    composer.show_state(is_writing=False, is_stopping=False, blocked="transformers accepts no prompts")
    assert composer.edit.height() == composer.edit.height_of(2) > one_line
    composer.show_state(is_writing=False, is_stopping=False, blocked="")
    assert composer.edit.height() == one_line


def test_a_models_text_loads_no_files_and_runs_no_html(talk, qtbot, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"x")
    type_and_send(talk, qtbot, "x")
    talk.token(f"![a](file://{secret}) <b>raw</b>")
    talk.finish()
    assert "<b>raw</b>" in talk.card.body.toPlainText()
    assert talk.card.body.loadResource(2, secret.as_uri()) is None


def first_starter(talk):
    return talk.page.starters.findChildren(StarterButton)[0]


def test_a_click_on_a_starter_sends_it(talk, qtbot):
    button = first_starter(talk)
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    (submit,) = talk.submits
    assert submit.messages[-1].content == button.accessibleName()
    assert talk.page.composer.edit.toPlainText() == ""
    assert talk.page.composer.edit.hasFocus(), "letters typed next would act as shortcuts of the window"


def test_a_starter_is_edited_first_with_shift(talk, qtbot):
    button = first_starter(talk)
    talk.page.starters.edit_wanted.emit(button.accessibleName())
    assert not talk.submits
    assert talk.page.composer.edit.toPlainText() == button.accessibleName()


def test_a_starter_waits_in_the_composer_while_nothing_can_be_sent(talk, qtbot):
    talk.engine.say(SourceState.LOADING)
    talk.session.poll()
    button = first_starter(talk)
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert not talk.submits
    assert talk.page.composer.edit.toPlainText() == button.accessibleName()


def test_a_starter_has_its_ends_when_text_grows(talk, qtbot):
    button = first_starter(talk)
    before = button.text()
    font = button.font()
    font.setPointSizeF(3 * font.pointSizeF())
    button.setFont(font)
    assert button.text() != before
    assert button.fontMetrics().horizontalAdvance(button.text()) < button.width()


def test_follow_can_be_turned_off(talk, qtbot):
    talk.page.head.follow.click()
    type_and_send(talk, qtbot, "x")
    talk.accept()
    assert talk.session.selection.request is None
    talk.engine.request(3)
    talk.session.poll()
    talk.card.link.click()
    assert talk.session.selection.request == 3


def test_long_conversations_show_the_newest_first(talk, qtbot):
    for index in range(45):
        talk.chat.ask(talk.page.current, f"p{index}")
        talk.token("a")
        talk.finish()
    talk.page.show_row(0)
    other = talk.chat.add(talk.page.current)
    talk.page.show_conversation(other)
    talk.page.show_row(1)
    assert len(talk.page.transcript.cards) == 40
    driver.press(talk.page.transcript, "Show earlier messages")
    assert len(talk.page.transcript.cards) == 80


def test_the_context_is_what_one_request_may_hold(talk, engine, poll):
    """Not the model's length, where the pool holds less."""
    model = replace(engine.hello.model, max_model_len=8_192)
    cache = replace(engine.hello.cache, max_request_tokens=1_536)
    engine.hello = replace(engine.hello, model=model, cache=cache)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(talk.session)
    talk.page.show_status()
    assert talk.page.context.text.text().endswith("of 1\u202f536 context tokens")


def test_the_context_bar_warns_when_nearly_full(talk):
    talk.page.context.show_fill(7_900, 8_192)
    assert talk.page.context.text.text() == "7\u202f900 of 8\u202f192 context tokens, 292 left"
    assert THEMES["dark"].bad in talk.page.context.bar.styleSheet()


def test_what_came_of_an_answer_is_kept_while_it_is_written(talk, qtbot, tmp_path, monkeypatch):
    monkeypatch.setattr("kvscope_app.views.console.conversation_saver.SAVE_WRITING_S", 0.01)
    type_and_send(talk, qtbot, "Hello")
    talk.accept()
    talk.chat.save()
    talk.token("half an ans")
    store = ConversationStore(tmp_path / "conversations")
    qtbot.waitUntil(lambda: "half an ans" in store.load().conversations[0].messages[-1].content, timeout=120_000)
    assert talk.chat.answer_of(talk.page.current.key) is not None  # it goes on


def test_a_narrow_console_cuts_nothing_off(talk, qtbot):
    type_and_send(talk, qtbot, "Hello")
    talk.accept(number=12_345)
    talk.token("```\nprint('a line of code that is much longer than a narrow dock can show at once')\n```\n")
    talk.finish()
    talk.view.resize(talk.view.minimumSizeHint().width(), 560)
    body = talk.page.transcript.widget()
    qtbot.waitUntil(lambda: body.width() <= talk.page.transcript.viewport().width(), timeout=120_000)
    assert talk.card.body.document().size().width() <= talk.card.body.viewport().width()


def test_an_answer_finds_its_request_where_the_engine_tells_no_number(talk, engine, poll, qtbot):
    type_and_send(talk, qtbot, "Hello there")
    talk.reply(Accepted(request_id=talk.request_id, numbers=(), num_prompt_tokens=0))
    engine.request(5, blocks=[7])
    engine.requests[6] = replace(engine.requests[5], number=6, request_id=f"chatcmpl-{talk.request_id}-9a4b")
    engine.frame((), new_requests=(engine.requests[6],))
    poll(talk.session)
    talk.token("Hi")
    assert talk.chat.answer_of(talk.page.current.key).message.stats.number == 6


def have_adapters(talk, *names):
    """The engine has said so, or not (no `names` at all: None)."""
    adapters = None if names == (None,) else tuple(LoadedAdapter(name=name, path=f"/adapters/{name}") for name in names)
    talk.engine.source.status = replace_fields(talk.engine.source.status, adapters=adapters)
    talk.session.poll()


def choose_adapter(talk, qtbot, text):
    box = talk.page.options.adapter
    talk.page.head.settings.setChecked(True)
    box.setFocus()
    box.setCurrentText(text)
    box.activated.emit(box.currentIndex())  # as a click in the list does


def adapters_offered(talk):
    box = talk.page.options.adapter
    return [box.itemText(index) for index in range(box.count())]


def test_an_adapter_is_chosen_where_there_are_any_and_sent(talk, qtbot):
    talk.page.head.settings.setChecked(True)
    have_adapters(talk)
    assert not talk.page.options.adapter.isVisible()
    have_adapters(talk, "sql", "python")
    assert talk.page.options.adapter.isVisible()
    assert adapters_offered(talk) == ["None", "sql", "python"]
    type_and_send(talk, qtbot, "One")
    talk.finish()
    choose_adapter(talk, qtbot, "sql")
    type_and_send(talk, qtbot, "Two")
    assert [submit.adapter for submit in talk.submits] == ["", "sql"]
    assert [card.who.text() for card in talk.page.transcript.cards[1::2]] == ["Answer", "Answer  ·  sql"]
    talk.finish()
    talk.page.new_conversation()
    assert talk.page.options.adapter.currentText() == "sql", "as the other options"


def test_an_adapter_that_is_gone_is_said_and_no_prompt_is_sent(talk, qtbot):
    have_adapters(talk, "sql", "python")
    choose_adapter(talk, qtbot, "sql")
    have_adapters(talk, "python")
    assert adapters_offered(talk) == ["None", "python", "sql (not loaded)"]
    assert talk.page.options.problem.startswith("LoRA adapter 'sql' is not loaded at this engine")
    type_and_send(talk, qtbot, "One")
    assert talk.submits == []
    have_adapters(talk, None)
    assert talk.page.options.problem == "", "nobody knows"
    have_adapters(talk, "sql")
    type_and_send(talk, qtbot, "")
    assert [submit.adapter for submit in talk.submits] == ["sql"]


def test_the_chosen_adapter_is_there_again(talk, make_talk, qtbot):
    have_adapters(talk, "sql")
    choose_adapter(talk, qtbot, "sql")
    type_and_send(talk, qtbot, "One")
    talk.finish()
    talk.view.shut_down()
    again = make_talk()
    assert again.page.options.adapter.currentData() == "sql"
    assert again.page.transcript.cards[1].who.text() == "Answer  ·  sql"


def test_the_engine_is_asked_how_it_is_while_the_console_is_seen(talk):
    talk.view.refresh()
    talk.view.refresh()
    assert sum(isinstance(command, GetStatus) for command in talk.engine.source.sent) == 1

"""Tests of the console: sending prompts, receiving answers, options, history and adapters."""

from __future__ import annotations

from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from tests.app import window_driver as driver

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.conversation import Conversation, sampling_to_send
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_app.views.console.sample_prompt_buttons import SamplePromptButton
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    GetStatus,
    LoadedAdapter,
    Refused,
)
from kvscope_telemetry.messages.sampling_params import ModelSampling, SamplingParams
from kvscope_telemetry.source import SourceState, Update


def type_and_send(console, qtbot, text):
    console.page.composer.edit.setFocus()
    qtbot.keyClicks(console.page.composer.edit, text)
    qtbot.keyClick(console.page.composer.edit, Qt.Key.Key_Return)


def test_enter_sends_and_the_answer_streams_in(console, qtbot):
    type_and_send(console, qtbot, "Hello there")
    assert [m.content for m in console.submits[0].messages] == ["Hello there"]
    assert console.page.composer.edit.toPlainText() == ""
    assert console.page.composer.stop.isVisible()
    console.accept()
    assert console.session.selection.request == 3
    assert console.card.link.text() == "Request #3"
    console.token("Good ")
    console.token("**day**")
    assert console.card.body.toPlainText() == "Good day"
    console.view.refresh()
    assert "first seen after" in console.card.stats.text()
    console.finish()
    assert console.card.body.toPlainText() == "Good day"
    assert console.card.stats.text() == (
        "4 tokens  ·  2 tok/s  ·  first after 250 ms  ·  prompt 11 tokens, 8 cached  ·  1.75 s in total"
    )
    assert not console.page.composer.stop.isVisible()
    assert console.page.context.text.text() == "15 context tokens"


def test_next_turn_sends_the_whole_conversation(console, qtbot):
    type_and_send(console, qtbot, "One")
    console.token("Two")
    console.finish()
    type_and_send(console, qtbot, "Three")
    assert [m.role for m in console.submits[-1].messages] == ["user", "assistant", "user"]


def test_shift_enter_adds_a_line_and_an_empty_prompt_is_not_sent(console, qtbot):
    edit = console.page.composer.edit
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    assert console.submits == []
    height = edit.height()
    qtbot.keyClicks(edit, "a")
    qtbot.keyClick(edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(edit, "b")
    assert edit.toPlainText() == "a\nb"
    assert edit.height() > height


def test_up_and_down_recall_prompts_but_keep_edited_text(console, qtbot):
    edit = console.page.composer.edit
    for prompt in ("first", "second"):
        type_and_send(console, qtbot, prompt)
        console.finish()
    for key, shown in ((Qt.Key.Key_Up, "second"), (Qt.Key.Key_Up, "first"), (Qt.Key.Key_Down, "second")):
        qtbot.keyClick(edit, key)
        assert edit.toPlainText() == shown
    qtbot.keyClicks(edit, "!")
    qtbot.keyClick(edit, Qt.Key.Key_Up)
    assert edit.toPlainText() == "second!"


def test_stopped_answer_is_shown_as_stopped_only_after_the_engine_confirms(console, qtbot):
    type_and_send(console, qtbot, "Long story")
    console.accept()
    console.token("Once")
    qtbot.mouseClick(console.page.composer.stop, Qt.MouseButton.LeftButton)
    assert console.engine.source.sent[-1] == Abort(request_id=console.request_id)
    assert console.card.notice.text() == "Stopping…"
    assert not console.page.composer.stop.isEnabled()
    console.token(" upon")
    assert console.card.notice.text() == "Stopping…"
    console.finish("abort")
    assert console.card.notice.text() == "Stopped"
    assert console.card.message.content == "Once upon"
    assert not console.page.composer.stop.isVisible()


def test_refusal_is_shown_in_place_of_the_answer(console, qtbot):
    type_and_send(console, qtbot, "x")
    console.reply(Refused(request_id=console.request_id, reason="prompt has 9000 tokens, the model takes 8192"))
    assert console.card.notice.text() == (
        "Not accepted: prompt has 9\u202f000 tokens, the model takes 8\u202f192.  Later prompts leave this turn out"
    )
    assert not console.card.body.isVisible()
    assert not console.page.composer.stop.isVisible()


def test_failed_answer_keeps_its_partial_text(console, qtbot):
    type_and_send(console, qtbot, "x")
    console.token("half")
    console.finish("error", error="the forward pass failed")
    assert console.card.notice.text() == "Failed: the forward pass failed"
    assert console.card.body.toPlainText() == "half"


def test_partial_answer_is_kept_when_the_engine_dies(console, qtbot):
    type_and_send(console, qtbot, "x")
    console.token("half an ans")
    console.engine.set_status(SourceState.ENDED, "killed by signal 9")
    console.session.poll()
    console.chat.flush()
    assert console.card.message.ending == "interrupted"
    assert console.card.notice.text() == "Interrupted: killed by signal 9"
    assert console.card.body.toPlainText() == "half an ans"
    assert console.page.composer.edit.placeholderText() == "The engine has stopped"
    qtbot.keyClicks(console.page.composer.edit, "more")
    qtbot.keyClick(console.page.composer.edit, Qt.Key.Key_Return)
    assert len(console.submits) == 1
    assert console.page.composer.edit.toPlainText() == "more"


def test_answer_is_interrupted_when_the_engine_restarts(console, qtbot, poll):
    type_and_send(console, qtbot, "x")
    console.accept()
    console.engine.restart(epoch=8)
    poll(console.session)
    console.session.status_changed.emit()
    console.chat.flush()
    assert console.card.message.ending == "interrupted"
    console.card.link.click()
    assert console.page.notice.text() == "Request #3 is no longer known to the engine."


def test_request_link_carries_a_63_bit_epoch(console, qtbot, poll):
    console.engine.restart(epoch=4_812_049_538_478_226_247)
    poll(console.session)
    console.session.status_changed.emit()
    type_and_send(console, qtbot, "x")
    console.accept()
    with qtbot.waitSignal(console.page.transcript.request_clicked) as signal:
        console.card.link.click()
    assert signal.args == [4_812_049_538_478_226_247, 3]


def test_two_conversations_are_answered_concurrently(console, qtbot):
    type_and_send(console, qtbot, "first")
    first = console.request_id
    console.page.new_conversation()
    type_and_send(console, qtbot, "second")
    second = console.request_id
    console.token("aaa", first)
    console.token("bbb", second)
    assert console.card.body.toPlainText() == "bbb"
    console.page.show_row(1)
    assert console.page.current.title == "first"
    assert console.card.body.toPlainText() == "aaa"
    console.token("AAA", first)
    assert console.card.body.toPlainText() == "aaaAAA"
    console.finish("length", first)
    assert not console.chat.is_writing(console.page.current.key)
    assert console.page.combo.itemText(0) == "● second"


def test_regenerate_sends_the_prompt_again(console, qtbot):
    type_and_send(console, qtbot, "Question")
    console.token("bad")
    console.finish()
    console.card.redo.click()
    assert [m.content for m in console.submits[-1].messages] == ["Question"]
    assert len(console.page.current.path) == 2
    console.token("good")
    assert console.card.body.toPlainText() == "good"


def test_edited_prompt_replaces_later_turns_and_escape_keeps_them(console, qtbot):
    for text in ("One", "Two"):
        type_and_send(console, qtbot, text)
        console.token(f"re {text}")
        console.finish()
    console.page.transcript.cards[0].redo.click()
    assert console.page.composer.edit.toPlainText() == "One"
    qtbot.keyClick(console.page.composer.edit, Qt.Key.Key_Escape)
    assert len(console.page.current.path) == 4
    console.page.transcript.cards[0].redo.click()
    type_and_send(console, qtbot, " more")
    assert [m.content for m in console.page.current.path] == ["One more", ""]


def test_copy_button_copies_the_markdown_source(console, qtbot):
    type_and_send(console, qtbot, "x")
    console.token("**bold**")
    console.finish()
    console.card.copy.click()
    assert QGuiApplication.clipboard().text() == "**bold**"


def test_sampling_options_are_sent_with_the_prompt_and_copied_to_new_conversations(console, qtbot):
    fields = console.page.options.fields
    console.page.head.settings.click()
    for name, text in (("temperature", "0,25"), ("seed", "42"), ("max_tokens", "")):
        fields[name].selectAll()
        qtbot.keyClicks(fields[name], text) if text else qtbot.keyClick(fields[name], Qt.Key.Key_Backspace)
    qtbot.keyClicks(console.page.options.stop, "END|\\n\\n")
    console.page.options.system.setPlainText("Be brief.")
    type_and_send(console, qtbot, "x")
    sampling = console.submits[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.25, 42, None)
    assert sampling.stop == ("END", "\n\n")
    assert console.submits[-1].messages[0].content == "Be brief."
    console.page.new_conversation()
    assert fields["seed"].text() == "42"
    console.page.options.reset.click()
    assert (fields["temperature"].text(), fields["seed"].text()) == ("", "")


def test_empty_option_fields_use_the_generation_config_of_the_model(console, qtbot):
    panel, makers = console.page.options, ModelSampling(temperature=0.6, top_k=20)

    def shown():
        return [panel.fields[name].placeholderText() for name in ("temperature", "top_p", "top_k", "min_p")]

    assert shown() == ["0.7", "0.95", "0", "0"]
    type_and_send(console, qtbot, "x")
    sampling = console.submits[-1].sampling
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
        ("temperature", "-1", "temperature=-1.0 is not accepted: must be a number from 0 to 100"),
        ("temperature", "warm", "temperature='warm' is not accepted: must be a number from 0 to 100"),
        ("temperature", "nan", "temperature='nan' is not accepted: must be a number from 0 to 100"),
        ("top_p", "0", "top_p=0.0 is not accepted: must be a number above 0 and at most 1"),
        ("max_tokens", "1.5", "max_tokens='1.5' is not accepted: must be a whole number from 1 to 16777216"),
        ("top_k", "x", "top_k='x' is not accepted: must be a whole number from -1 to 2147483648"),
    ],
)
def test_invalid_option_is_reported_and_nothing_is_sent(console, qtbot, name, text, message):
    field = console.page.options.fields[name]
    field.clear()
    qtbot.keyClicks(field, text)
    assert console.page.options.error.text() == message
    assert console.page.options.error.isVisible()
    type_and_send(console, qtbot, "x")
    assert console.submits == []
    console.page.options.reset.click()
    assert not console.page.options.error.isVisible()
    qtbot.keyClick(console.page.composer.edit, Qt.Key.Key_Return)
    assert len(console.submits) == 1


def test_conversations_are_restored_at_the_next_start(console, make_console, qtbot):
    type_and_send(console, qtbot, "Remember me")
    console.token("always")
    console.finish()
    console.view.hide()
    again = make_console()
    assert again.page.current.title == "Remember me"
    assert [card.body.toPlainText() for card in again.page.transcript.cards] == ["Remember me", "always"]
    assert "4 tokens" in again.card.stats.text()


def test_corrupt_conversation_file_is_reported(make_console, tmp_path):
    folder = tmp_path / "conversations"
    folder.mkdir()
    (folder / "x.json").write_text("{")
    console = make_console()
    assert "set aside as x.json.unreadable" in console.page.notice.text()
    assert console.page.notice.isVisible()


def test_conversation_can_be_renamed_deleted_and_restored(console, qtbot, tmp_path):
    type_and_send(console, qtbot, "Old name")
    console.token("text")
    console.finish()
    console.page.head.rename.click()
    console.page.head.title_line.clear()
    qtbot.keyClicks(console.page.head.title_line, "New name")
    qtbot.keyClick(console.page.head.title_line, Qt.Key.Key_Return)
    assert console.page.combo.currentText() == "New name"
    console.chat.save()
    console.page.head.remove.click()
    assert ConversationStore(tmp_path / "conversations").load().conversations == []
    assert console.page.sample_buttons.isVisible()
    console.page.undo.click()
    assert console.page.current.title == "New name"
    console.chat.save()
    assert len(ConversationStore(tmp_path / "conversations").load().conversations) == 1


def test_deleting_a_conversation_aborts_its_request(console, qtbot):
    type_and_send(console, qtbot, "x")
    console.page.head.remove.click()
    assert console.engine.source.sent[-1] == Abort(request_id=console.request_id)
    console.token("late")
    console.finish("abort")


def test_wide_console_shows_the_conversation_list(console):
    assert not console.page.list.isVisible()
    console.view.resize(900, 500)
    assert console.page.list.isVisible()
    assert not console.page.combo.isVisible()


def test_title_has_a_line_of_its_own_in_a_narrow_console(console, qtbot):
    head = console.page.head
    console.view.resize(280, 500)
    qtbot.waitUntil(lambda: head.combo.width() > 200)
    assert head.new.y() > head.combo.y()
    console.view.resize(600, 500)
    qtbot.waitUntil(lambda: abs(head.new.y() - head.combo.y()) < 10)
    assert console.view.minimumSizeHint().width() < 300, "a wide console can be made narrow again"


@pytest.mark.parametrize("state", [SourceState.CONNECTING, SourceState.LOADING])
def test_nothing_is_sent_before_the_engine_is_ready(console, qtbot, state):
    console.engine.set_status(state)
    console.session.poll()
    type_and_send(console, qtbot, "early")
    assert console.submits == []
    assert console.page.composer.edit.toPlainText() == "early"
    assert console.page.notice.text() == console.page.why_blocked() != ""
    console.engine.set_live()
    console.session.poll()
    assert not console.page.notice.isVisible()


def test_narrow_composer_wraps_the_reason_why_nothing_can_be_sent(qtbot):
    composer = Composer()
    composer.apply_theme(THEMES["dark"])  # the button that attaches files is an icon only with a theme
    qtbot.addWidget(composer)
    composer.resize(340, 100)
    composer.show()
    one_line = composer.edit.height()
    composer.show_state(is_writing=False, is_stopping=False, blocked="transformers accepts no prompts")
    assert composer.edit.height() == composer.edit.height_of(2) > one_line
    composer.show_state(is_writing=False, is_stopping=False, blocked="")
    assert composer.edit.height() == one_line


def test_answer_text_loads_no_files_and_renders_no_html(console, qtbot, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"x")
    type_and_send(console, qtbot, "x")
    console.token(f"![a](file://{secret}) <b>raw</b>")
    console.finish()
    assert "<b>raw</b>" in console.card.body.toPlainText()
    assert console.card.body.loadResource(2, secret.as_uri()) is None


def first_sample_button(console):
    return console.page.sample_buttons.findChildren(SamplePromptButton)[0]


def test_click_on_a_starter_prompt_sends_it(console, qtbot):
    button = first_sample_button(console)
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    (submit,) = console.submits
    assert submit.messages[-1].content == button.accessibleName()
    assert console.page.composer.edit.toPlainText() == ""
    assert console.page.composer.edit.hasFocus(), "otherwise letters typed next would trigger shortcuts of the window"


def test_starter_prompt_can_be_edited_before_sending(console, qtbot):
    button = first_sample_button(console)
    console.page.sample_buttons.edit_requested.emit(button.accessibleName())
    assert not console.submits
    assert console.page.composer.edit.toPlainText() == button.accessibleName()


def test_starter_prompt_is_put_into_the_composer_while_nothing_can_be_sent(console, qtbot):
    console.engine.set_status(SourceState.LOADING)
    console.session.poll()
    button = first_sample_button(console)
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert not console.submits
    assert console.page.composer.edit.toPlainText() == button.accessibleName()


def test_starter_button_elides_its_text_when_the_font_grows(console, qtbot):
    button = first_sample_button(console)
    before = button.text()
    font = button.font()
    font.setPointSizeF(3 * font.pointSizeF())
    button.setFont(font)
    assert button.text() != before
    assert button.fontMetrics().horizontalAdvance(button.text()) < button.width()


def test_request_is_not_selected_if_follow_is_off(console, qtbot):
    console.page.head.follow.click()
    type_and_send(console, qtbot, "x")
    console.accept()
    assert console.session.selection.request is None
    console.engine.request(3)
    console.session.poll()
    console.card.link.click()
    assert console.session.selection.request == 3


def test_long_conversation_shows_the_newest_messages_first(console, qtbot):
    for index in range(45):
        console.chat.ask(console.page.current, f"p{index}")
        console.token("a")
        console.finish()
    console.page.show_row(0)
    other = console.chat.add_conversation(console.page.current)
    console.page.show_conversation(other)
    console.page.show_row(1)
    assert len(console.page.transcript.cards) == 40
    driver.click_button(console.page.transcript, "Show earlier messages")
    assert len(console.page.transcript.cards) == 80


def test_context_limit_shown_is_the_kv_cache_capacity_if_smaller_than_the_model_limit(console, engine, poll):
    model = replace(engine.hello.model, max_model_len=8_192)
    cache = replace(engine.hello.cache, max_request_tokens=1_536)
    engine.hello = replace(engine.hello, model=model, cache=cache)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(console.session)
    console.page.show_status()
    assert console.page.context.text.text().endswith("of 1\u202f536 context tokens")


def test_context_bar_warns_when_nearly_full(console):
    console.page.context.show_fill(7_900, 8_192)
    assert console.page.context.text.text() == "7\u202f900 of 8\u202f192 context tokens, 292 left"
    assert THEMES["dark"].bad in console.page.context.bar.styleSheet()


def test_partial_answer_is_saved_while_it_is_written(console, qtbot, tmp_path, monkeypatch):
    monkeypatch.setattr("kvscope_app.views.console.conversation_saver.UNFINISHED_SAVE_INTERVAL_S", 0.01)
    type_and_send(console, qtbot, "Hello")
    console.accept()
    console.chat.save()
    console.token("half an ans")
    store = ConversationStore(tmp_path / "conversations")
    qtbot.waitUntil(lambda: "half an ans" in store.load().conversations[0].messages[-1].content, timeout=120_000)
    assert console.chat.is_writing(console.page.current.key)  # the answer is still being written


def test_narrow_console_truncates_nothing(console, qtbot):
    type_and_send(console, qtbot, "Hello")
    console.accept(number=12_345)
    console.token("```\nprint('a line of code that is much longer than a narrow dock can show at once')\n```\n")
    console.finish()
    console.view.resize(console.view.minimumSizeHint().width(), 560)
    body = console.page.transcript.widget()
    qtbot.waitUntil(lambda: body.width() <= console.page.transcript.viewport().width(), timeout=120_000)
    assert console.card.body.document().size().width() <= console.card.body.viewport().width()


def test_answer_finds_its_request_by_id_if_the_engine_reports_no_number(console, engine, poll, qtbot):
    type_and_send(console, qtbot, "Hello there")
    console.reply(Accepted(request_id=console.request_id, numbers=(), num_prompt_tokens=0))
    engine.request(5, blocks=[7])
    engine.requests[6] = replace(engine.requests[5], number=6, request_id=f"chatcmpl-{console.request_id}-9a4b")
    engine.frame((), new_requests=(engine.requests[6],))
    poll(console.session)
    console.token("Hi")
    assert console.chat.answers_of(console.page.current.key)[0].message.stats.number == 6


def set_adapters(console, *names):
    """Set the adapters that the engine reports. A single name `None` means that it reports none."""
    adapters = None if names == (None,) else tuple(LoadedAdapter(name=name, path=f"/adapters/{name}") for name in names)
    console.engine.source.status = replace_fields(console.engine.source.status, adapters=adapters)
    console.session.poll()


def choose_adapter(console, qtbot, text):
    box = console.page.options.adapter
    console.page.head.settings.setChecked(True)
    box.setFocus()
    box.setCurrentText(text)
    box.activated.emit(box.currentIndex())  # as a click in the list does


def adapters_offered(console):
    box = console.page.options.adapter
    return [box.itemText(index) for index in range(box.count())]


def test_chosen_adapter_is_sent_and_shown_with_the_answer(console, qtbot):
    console.page.head.settings.setChecked(True)
    set_adapters(console)
    assert not console.page.options.adapter.isVisible()
    set_adapters(console, "sql", "python")
    assert console.page.options.adapter.isVisible()
    assert adapters_offered(console) == ["None", "sql", "python"]
    type_and_send(console, qtbot, "One")
    console.finish()
    choose_adapter(console, qtbot, "sql")
    type_and_send(console, qtbot, "Two")
    assert [submit.adapter for submit in console.submits] == ["", "sql"]
    assert [card.role_label.text() for card in console.page.transcript.cards[1::2]] == ["Answer", "Answer  ·  sql"]
    console.finish()
    console.page.new_conversation()
    assert console.page.options.adapter.currentText() == "sql", "a new conversation copies the adapter"


def test_unloaded_adapter_is_reported_and_no_prompt_is_sent(console, qtbot):
    set_adapters(console, "sql", "python")
    choose_adapter(console, qtbot, "sql")
    set_adapters(console, "python")
    assert adapters_offered(console) == ["None", "python", "sql (not loaded)"]
    assert console.page.options.problem.startswith("LoRA adapter 'sql' is not loaded at this engine")
    type_and_send(console, qtbot, "One")
    assert console.submits == []
    set_adapters(console, None)
    assert console.page.options.problem == "", "the loaded adapters are unknown"
    set_adapters(console, "sql")
    type_and_send(console, qtbot, "")
    assert [submit.adapter for submit in console.submits] == ["sql"]


def test_chosen_adapter_is_restored_at_the_next_start(console, make_console, qtbot):
    set_adapters(console, "sql")
    choose_adapter(console, qtbot, "sql")
    type_and_send(console, qtbot, "One")
    console.finish()
    console.view.shut_down()
    again = make_console()
    assert again.page.options.adapter.currentData() == "sql"
    assert again.page.transcript.cards[1].role_label.text() == "Answer  ·  sql"


def test_visible_console_requests_the_engine_status_once(console):
    console.view.refresh()
    console.view.refresh()
    assert sum(isinstance(command, GetStatus) for command in console.engine.source.sent) == 1

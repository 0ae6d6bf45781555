"""Tests of two windows that share conversations."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.console_view import ConsoleView
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Tokens, Usage


class ConsoleWindow:
    """Console of one window, with its own engine."""

    def __init__(self, engine, session, view):
        self.engine, self.session, self.view = engine, session, view
        self.page, self.chat = view.page, view.chat

    def send(self, text):
        self.page.composer.set_text(text)
        self.page.composer.button.click()

    def token(self, text):
        request_id = self.engine.source.sent[-1].request_id
        self.engine.source.replies.append(Tokens(request_id=request_id, token_ids=(1,), text=text))
        self.session.poll()
        self.chat.flush()

    def finish(self):
        request_id = self.engine.source.sent[-1].request_id
        times = {"usage": Usage(), "timing": RequestTiming(queue_s=0.0, ttft_s=0.1, total_s=1.0)}
        self.engine.source.replies.append(Finished(request_id=request_id, finish_reason="stop", **times))
        self.session.poll()
        self.chat.flush()

    @property
    def texts(self):
        return [message.content for message in self.page.current.path]

    @property
    def shown(self):
        return [card.body.toPlainText() for card in self.page.transcript.cards]


@pytest.fixture
def open_window(make_engine, make_session, qtbot, tmp_path):
    def open_one():
        engine = make_engine()
        session = make_session(engine)
        view = ConsoleView(session, folder=tmp_path / "conversations")
        qtbot.addWidget(view)
        view.apply_theme(THEMES["dark"])
        view.show()
        session.status_changed.emit()
        return ConsoleWindow(engine, session, view)

    return open_one


def saved_texts(tmp_path):
    """Return the texts of all saved messages, sorted."""
    store = ConversationStore(tmp_path / "conversations")
    found = [m.content for c in store.load().conversations for m in c.messages]
    store.close()
    return sorted(found)


def test_answer_written_in_another_window_is_shown_and_blocks_sending(open_window):
    one, two = open_window(), open_window()
    one.send("Hello")
    one.token("Half an")
    one.chat.save()
    two.chat.reload_changes()
    two.page.show_conversation(two.chat.conversations[0])
    assert two.shown == ["Hello", "Half an"]
    two.send("Me too")  # the other window is still writing
    assert two.page.composer.edit.toPlainText() == "Me too"
    assert "Another window" in two.page.composer.edit.placeholderText()
    one.token(" answer")
    one.finish()
    one.chat.save()
    two.chat.reload_changes()
    assert two.shown == ["Hello", "Half an answer"]
    two.send("Me too")
    assert two.texts == ["Hello", "Half an answer", "Me too", ""]


def test_prompts_sent_at_once_from_two_windows_are_both_kept_as_versions(open_window, tmp_path):
    one = open_window()
    one.send("Hello")
    one.token("Hi")
    one.finish()
    one.chat.save()
    two = open_window()
    for window, prompt in ((one, "from one"), (two, "from two")):
        window.chat.reload_changes = lambda: None  # prevent each window from seeing the other's turn
        window.send(prompt)
        window.token(f"answer {prompt}")
        window.finish()
        window.chat.save()
    two.chat.save()
    wanted = ["Hello", "Hi", "from one", "answer from one", "from two", "answer from two"]
    assert saved_texts(tmp_path) == sorted(wanted)
    assert "both versions are kept" in two.page.notice.text()
    assert two.texts == ["Hello", "Hi", "from two", "answer from two"]
    assert len(two.chat.conversations) == 1
    two.page.transcript.cards[2].versions.previous.click()
    assert two.texts == ["Hello", "Hi", "from one", "answer from one"]


def test_conversation_deleted_or_restored_in_one_window_follows_in_the_other(open_window):
    one = open_window()
    one.send("Hello")
    one.token("Hi")
    one.finish()
    one.chat.save()
    two = open_window()
    assert two.texts == ["Hello", "Hi"]
    one.page.head.remove.click()
    two.chat.reload_changes()
    assert two.texts == []
    assert len(two.chat.conversations) == 1
    one.page.undo.click()
    one.chat.save()
    two.chat.reload_changes()
    assert two.chat.conversations[0].messages[0].content == "Hello"


def test_failed_save_is_reported_and_retried(open_window, tmp_path, monkeypatch, qtbot):
    monkeypatch.setattr("kvscope_app.views.console.conversation_saver.RETRY_MS", 20)
    window = open_window()
    (tmp_path / "conversations").write_text("in the way")
    window.send("Hello")
    window.token("Hi")
    window.finish()
    window.chat.save()
    assert "was not saved" in window.page.notice.text()
    assert "retrying" in window.page.notice.text()
    (tmp_path / "conversations").unlink()
    qtbot.waitUntil(lambda: "saved again" in window.page.notice.text(), timeout=120_000)
    assert saved_texts(tmp_path) == ["Hello", "Hi"]


def test_closing_the_window_saves_the_partial_answer(open_window, tmp_path):
    window = open_window()
    window.send("Hello")
    window.token("Half")
    window.view.shut_down()
    assert saved_texts(tmp_path) == ["Half", "Hello"]

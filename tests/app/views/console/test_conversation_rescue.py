"""Tests of conversations that cannot be saved when the window closes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.conversation_saver import ConversationSaver, rescue_text, write_rescue_files
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_telemetry.errors import KvscopeError


def conversation(text):
    return Conversation(key="0123456789abcdef", messages=[Message(role="user", content=text)])


@pytest.fixture
def saver_and_conversation(qapp, tmp_path):
    ours = conversation("words that matter")
    saver = ConversationSaver(ConversationStore(tmp_path / "c"), [ours], {}, lambda key: False, qapp)
    yield saver, ours
    saver.deleteLater()


def test_failed_save_is_retried_once_and_leaves_no_rescue_file(saver_and_conversation, monkeypatch):
    made, ours = saver_and_conversation
    real, calls = made.store.save, []

    def save(*args, **more):
        calls.append(args)
        if len(calls) == 1:
            raise KvscopeError("the disk is full")
        return real(*args, **more)

    monkeypatch.setattr(made.store, "save", save)
    made.mark_changed(ours)
    assert made.shut_down() == ""
    assert len(calls) == 2
    assert not list(made.store.folder.glob("*.json"))


def test_unsaved_conversation_is_written_to_a_file_and_imported_at_the_next_start(saver_and_conversation, monkeypatch):
    made, ours = saver_and_conversation

    def save(*args, **more):
        raise KvscopeError("the disk is full")

    monkeypatch.setattr(made.store, "save", save)
    made.mark_changed(ours)
    said = made.shut_down()
    (path,) = made.store.folder.glob("*.json")
    assert str(path) in said
    assert "imported at the next start" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = ConversationStore(made.store.folder)
    (found,) = again.load().conversations
    again.close()
    assert found.messages[0].content == "words that matter"
    assert not path.exists()


def test_rescue_uses_the_home_folder_if_the_data_folder_is_unusable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folder, home = tmp_path / "file" / "c", tmp_path / "me"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    paths, is_all = write_rescue_files(folder, [conversation("x")])
    assert is_all
    assert [path.parent for path in paths] == [home]
    assert f"Move them to {folder}" in rescue_text(paths, is_all, folder)

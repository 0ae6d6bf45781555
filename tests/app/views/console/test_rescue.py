"""Words that cannot be saved when the window closes are written beside the database, and come back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.conversation_saver import ConversationSaver, rescue, rescue_text
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_telemetry.errors import KvscopeError


def conversation(text):
    return Conversation(key="0123456789abcdef", messages=[Message(role="user", content=text)])


@pytest.fixture
def keeper(qapp, tmp_path):
    ours = conversation("words that matter")
    made = ConversationSaver(ConversationStore(tmp_path / "c"), [ours], {}, lambda key: False, qapp)
    yield made, ours
    made.deleteLater()


def test_what_fails_once_is_tried_again_and_leaves_no_file(keeper, monkeypatch):
    made, ours = keeper
    real, calls = made.store.save, []

    def save(*args, **more):
        calls.append(args)
        if len(calls) == 1:
            raise KvscopeError("the disk is full")
        return real(*args, **more)

    monkeypatch.setattr(made.store, "save", save)
    made.touch(ours)
    assert made.shut_down() == ""
    assert len(calls) == 2
    assert not list(made.store.folder.glob("*.json"))


def test_what_still_fails_is_in_a_file_that_the_next_start_takes_in(keeper, monkeypatch):
    made, ours = keeper

    def save(*args, **more):
        raise KvscopeError("the disk is full")

    monkeypatch.setattr(made.store, "save", save)
    made.touch(ours)
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


def test_where_the_folder_takes_nothing_the_home_does(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folder, home = tmp_path / "file" / "c", tmp_path / "me"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    paths, is_all = rescue(folder, [conversation("x")])
    assert is_all
    assert [path.parent for path in paths] == [home]
    assert f"Move them to {folder}" in rescue_text(paths, is_all, folder)

"""Conversations on disk: whole or not at all, and one bad file hides none of the others."""

from __future__ import annotations

import pytest

from kvscope_app.views.console.conversation import Conversation, Message, new_conversation, title_from, to_send
from kvscope_app.views.console.store import ConversationStore
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.sampling_params import SamplingParams


@pytest.fixture
def store(tmp_path):
    return ConversationStore(tmp_path / "conversations")


def conversation(key="a", changed_s=1.0):
    messages = [Message(role="user", content="hé"), Message(role="assistant", content="ho", ending="stop")]
    return Conversation(
        key=key,
        title="t",
        system="be kind",
        sampling=SamplingParams(seed=-5, stop=("\n",)),
        messages=messages,
        changed_s=changed_s,
    )


def test_what_was_saved_comes_back_newest_first(store):
    store.save(conversation("a", 1.0))
    store.save(conversation("b", 2.0))
    loaded = store.load()
    assert loaded.conversations == [conversation("b", 2.0), conversation("a", 1.0)]
    assert loaded.warnings == []


def test_nothing_saved_is_nothing_wrong(store):
    assert store.load().conversations == []
    assert not store.folder.exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"key":"bad","messages":[{"role":"robot"}]}', b'{"key":"other"}', b"\xff\xfe"]
)
def test_an_unreadable_file_is_kept_aside_and_told(store, data):
    store.save(conversation())
    (store.folder / "bad.json").write_bytes(data)
    loaded = store.load()
    assert [c.key for c in loaded.conversations] == ["a"]
    assert len(loaded.warnings) == 1
    assert "bad.json.unreadable" in loaded.warnings[0]
    assert (store.folder / "bad.json.unreadable").read_bytes() == data
    assert store.load().warnings == []


def test_options_out_of_range_in_a_file_are_not_believed(store):
    store.save(conversation())
    path = store.folder / "a.json"
    path.write_text(path.read_text().replace('"seed":-5', '"temperature":-5'))
    assert "temperature" in store.load().warnings[0]


def test_a_full_disk_keeps_the_old_file(store, monkeypatch):
    store.save(conversation())
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    changed = conversation()
    changed.title = "changed"
    with pytest.raises(KvscopeError, match="No space left"):
        store.save(changed)
    assert [c.title for c in store.load().conversations] == ["t"]
    assert [path.name for path in store.folder.iterdir()] == ["a.json"]


def test_without_sync_nothing_waits_for_the_disk(store, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: pytest.fail("waited for the disk"))
    store.save(conversation(), sync=False)
    assert [c.title for c in store.load().conversations] == ["t"]


def test_an_answer_cut_off_by_the_end_of_the_desktop_is_marked(store):
    unfinished = conversation()
    unfinished.messages[-1].ending = ""
    store.save(unfinished)
    (loaded,) = store.load().conversations
    assert loaded.messages[-1].ending == "interrupted"
    assert loaded.messages[-1].content == "ho"


def test_deleting_twice_is_no_error(store):
    store.save(conversation())
    store.delete("a")
    store.delete("a")
    assert store.load().conversations == []


def test_refused_prompts_are_not_sent_again():
    talk = new_conversation()
    talk.system = "be kind"
    talk.messages = [
        Message(role="user", content="too long"),
        Message(role="assistant", ending="refused"),
        Message(role="user", content="short"),
        Message(role="assistant", content="part", ending="stopped"),
        Message(role="user", content="go on"),
    ]
    assert [(turn.role, turn.content) for turn in to_send(talk)] == [
        ("system", "be kind"),
        ("user", "short"),
        ("assistant", "part"),
        ("user", "go on"),
    ]


def test_titles_are_one_short_line():
    assert title_from("a\n  b") == "a b"
    assert len(title_from("word " * 40)) <= 60

"""Tests of the conversation store: saving, damaged data, concurrent windows and processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import msgspec
import pytest

from kvscope_app.views.console.conversation import Conversation, Message, messages_to_send, title_from
from kvscope_app.views.console.conversation_store import FILE_NAME, ChangedElsewhere, ConversationStore
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.sampling_params import SamplingParams


@pytest.fixture
def store(tmp_path):
    store = ConversationStore(tmp_path / "conversations")
    yield store
    store.close()


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


def test_saved_conversations_are_loaded_newest_first(store):
    store.save(conversation("a", 1.0))
    store.save(conversation("b", 2.0))
    loaded = store.load()
    assert loaded.conversations == [conversation("b", 2.0), conversation("a", 1.0)]
    assert loaded.warnings == []


def test_missing_folder_loads_as_empty_and_is_not_created(store):
    assert store.load().conversations == []
    assert not store.folder.exists()


def write_rescue_file(store, data, name="bad"):
    """Write a rescue file, as for a conversation that the database did not accept."""
    store.folder.mkdir(exist_ok=True)
    (store.folder / f"{name}.json").write_bytes(data)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"key":"bad","messages":[{"role":"robot"}]}', b'{"key":"other"}', b"\xff\xfe"]
)
def test_unreadable_rescue_file_is_set_aside_and_reported(store, data):
    write_rescue_file(store, msgspec.json.encode(conversation()), "a")
    write_rescue_file(store, data)
    loaded = store.load()
    assert [c.key for c in loaded.conversations] == ["a"]
    assert len(loaded.warnings) == 1
    assert "bad.json.unreadable" in loaded.warnings[0]
    assert (store.folder / "bad.json.unreadable").read_bytes() == data
    assert store.load().warnings == []


def test_rescue_files_are_imported_once_and_kept(store):
    write_rescue_file(store, msgspec.json.encode(conversation("a", 1.0)), "a")
    write_rescue_file(store, msgspec.json.encode(conversation("b", 2.0)), "b")
    assert store.load().conversations == [conversation("b", 2.0), conversation("a", 1.0)]
    assert sorted(path.name for path in store.folder.glob("*.imported")) == ["a.json.imported", "b.json.imported"]
    store.delete("a")
    assert [c.key for c in ConversationStore(store.folder).load().conversations] == ["b"]


def test_conversation_with_invalid_options_is_set_aside(store):
    store.save(conversation())
    with sqlite3.connect(store.folder / FILE_NAME) as database:
        text = database.execute("SELECT data FROM conversations").fetchone()[0].decode()
        database.execute("UPDATE conversations SET data = ?", (text.replace('"seed":-5', '"temperature":-5').encode(),))
    database.close()
    assert "temperature" in store.load().warnings[0]
    again = store.load()
    assert (again.conversations, again.warnings) == ([], [])


@pytest.mark.parametrize("damage", [b"not a database, but long enough to be one" * 40, b""])
def test_damaged_database_is_set_aside_and_reported(store, damage):
    store.save(conversation())
    store.close()
    path = store.folder / FILE_NAME
    data = path.read_bytes()
    path.write_bytes(damage or data[:2000] + bytes(len(data) - 2000))
    loaded = store.load()
    assert loaded.conversations == []
    assert f"{FILE_NAME}.unreadable-1" in loaded.warnings[0]
    assert (store.folder / f"{FILE_NAME}.unreadable-1").exists()
    store.save(conversation("b"))
    assert [c.key for c in store.load().conversations] == ["b"]


def test_saving_on_a_full_disk_raises_and_keeps_the_saved_conversation(store):
    store.save(conversation())
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    changed = conversation()
    changed.messages[-1].content = "long " * 10_000
    with pytest.raises(KvscopeError, match="not saved: database or disk is full"):
        store.save(changed)
    assert [c.messages[-1].content for c in store.load().conversations] == ["ho"]
    store.save(changed)  # there is space again
    assert ConversationStore(store.folder).load().conversations == [changed]


def test_failure_to_create_the_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    store = ConversationStore(tmp_path / "file" / "conversations")
    with pytest.raises(KvscopeError, match="not saved: Not a directory"):
        store.save(conversation())
    assert store.load().conversations == []


def test_saving_a_conversation_changed_elsewhere_raises_until_the_change_is_accepted(store):
    store.save(conversation())
    other = ConversationStore(store.folder)
    (theirs,) = other.load().conversations
    theirs.title = "theirs"
    other.save(theirs)
    with pytest.raises(ChangedElsewhere) as caught:
        store.save(conversation())
    assert caught.value.theirs == theirs
    store.mark_seen("a")
    store.save(conversation())
    assert ConversationStore(store.folder).load().conversations == [conversation()]


def test_conversation_changes_made_by_another_store_are_returned_once(store):
    other = ConversationStore(store.folder)
    other.save(conversation("a"))
    other.save(conversation("b"))
    assert {c.key for c in store.read_changes().written} == {"a", "b"}
    assert store.read_changes().written == []
    other.delete("a")
    assert store.read_changes().deleted == ["a"]
    other.save(conversation("b", 9.0))
    assert store.read_changes(exclude={"b"}).written == []  # also changed here: its save will raise
    with pytest.raises(ChangedElsewhere):
        store.save(conversation("b", 8.0))


def test_concurrent_processes_lose_no_conversation(store):
    script = (
        "import sys, pathlib\n"
        "from kvscope_app.views.console.conversation_store import ConversationStore\n"
        "from kvscope_app.views.console.conversation import Conversation, Message\n"
        "store = ConversationStore(pathlib.Path(sys.argv[1]))\n"
        "for i in range(40):\n"
        "    talk = Conversation(key=f'{sys.argv[2]}-{i}', messages=[Message(role='user', content='x' * 500)])\n"
        "    store.save(talk, sync=False)\n"
    )
    command = [sys.executable, "-c", script, str(store.folder)]
    processes = [subprocess.Popen([*command, name]) for name in ("one", "two", "three")]
    assert [process.wait(240) for process in processes] == [0, 0, 0]
    assert len(store.load().conversations) == 120


def test_answer_of_a_killed_desktop_is_marked_as_interrupted(store):
    """While its writer lives, the answer is unfinished but not interrupted."""
    script = (
        "import sys, pathlib, time\n"
        "from kvscope_app.views.console.conversation_store import ConversationStore\n"
        "from kvscope_app.views.console.conversation import Conversation, Message\n"
        "talk = Conversation(key='a', messages=[Message(role='assistant', content='half')])\n"
        "ConversationStore(pathlib.Path(sys.argv[1])).save(talk, is_writing=True)\n"
        "print('saved', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(store.folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"saved\n"
        (loaded,) = store.load().conversations
        assert loaded.messages[0].ending == ""
        assert store.written_elsewhere == {"a"}
        process.kill()
    (marked,) = store.read_changes().written
    assert (marked.messages[0].ending, marked.messages[0].content) == ("interrupted", "half")
    assert store.written_elsewhere == set()


def test_unfinished_answer_without_a_writer_is_marked_as_interrupted(store):
    unfinished = conversation()
    unfinished.messages[-1].ending = ""
    store.save(unfinished)
    (loaded,) = store.load().conversations
    assert loaded.messages[-1].ending == "interrupted"
    assert loaded.messages[-1].content == "ho"


def test_deleting_a_conversation_twice_raises_nothing(store):
    store.save(conversation())
    store.delete("a")
    store.delete("a")
    assert store.load().conversations == []


def test_refused_prompts_are_not_sent_again():
    messages = [
        Message(role="user", content="too long"),
        Message(role="assistant", ending="refused"),
        Message(role="user", content="short"),
        Message(role="assistant", content="part", ending="stopped"),
        Message(role="user", content="go on"),
    ]
    conversation = Conversation(key="a", system="be kind", messages=messages)
    assert [(turn.role, turn.content) for turn in messages_to_send(conversation)] == [
        ("system", "be kind"),
        ("user", "short"),
        ("assistant", "part"),
        ("user", "go on"),
    ]


def test_conversation_title_is_shortened_to_one_line_of_60_characters():
    assert title_from("a\n  b") == "a b"
    assert len(title_from("word " * 40)) <= 60

"""Tests of export and import of conversations: what is written, what is added, and what is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvscope_app.ui.model_name import model_name
from kvscope_app.views.console.attachments import Attachment
from kvscope_app.views.console.conversation import AnswerStats, Conversation, Message
from kvscope_app.views.console.conversation_export import FORMAT, to_json, to_markdown
from kvscope_app.views.console.conversation_import import read_conversations
from kvscope_app.views.console.tools import ToolResult
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ToolCall


def conversation(**changes):
    messages = [
        Message(role="user", content="Why?", attachments=[Attachment(name="a.py", text="x = 1\n")], written_s=1e9),
        Message(
            role="assistant",
            content="Because.",
            ending="stop",
            stats=AnswerStats(model="tiny", num_tokens=3, tokens_per_s=12.0),
            token_ids=[5, 6, 7],
        ),
        Message(role="assistant", content="So it is.", ending="stop", key="other", parent="0"),
    ]
    values = {"key": "k1", "title": "Reasons", "messages": messages, "changed_s": 1e9, "system": "Be brief."}
    return Conversation(**values | changes)


@pytest.fixture
def undo_entries(console):
    done = []
    console.view.done.connect(lambda text, undo, redo: done.append((text, undo, redo)))
    return done


@pytest.fixture
def run_file(console, qtbot):
    """Return a function that exports or imports a file and waits for the notice about it."""

    def run(method, *arguments):
        with qtbot.waitSignal(console.page.files.reported, timeout=20_000) as signal:
            method(*arguments)
        return signal.args[0]

    return run


def titles(console):
    return sorted(each.title for each in console.chat.conversations if each.messages)


def test_json_export_is_imported_with_all_versions_and_figures(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(to_json([conversation()]))
    assert read_conversations(path) == [conversation()]
    assert json.loads(path.read_bytes())["version"] == 1


def test_markdown_export_has_title_model_turns_files_and_figures():
    text = to_markdown([conversation(last="1")])
    assert text.startswith("# Reasons\n")
    for part in (
        "- Model: tiny",
        "## System prompt",
        "a.py:\n```\nx = 1\n```\n\nWhy?",
        "Because.",
        "3 tokens",
        "12 tok/s",
    ):
        assert part in text
    assert "So it is." not in text


def test_markdown_export_has_calls_and_their_results():
    call = ToolCall(id="a", name="weather", arguments='{"city":"Oslo"}')
    chat = Conversation(key="k")
    chat.append("user", "How is the weather?")
    chat.append("assistant", "").tool_calls = [call]
    chat.append("user", "rain").tool_results = [ToolResult(id="a", name="weather", content="rain")]
    text = to_markdown([chat])
    assert 'Calls weather:\n\n```json\n{\n  "city": "Oslo"\n}\n```' in text
    assert "## Result of weather" in text


def test_conversation_is_exported_to_a_file_named_in_the_notice(console, run_file, tmp_path):
    console.ask("One", "re One")
    for name in ("c.md", "c.json"):
        assert "1 conversation exported" in run_file(console.page.files.export, console.page.current, tmp_path / name)
    assert "re One" in (tmp_path / "c.md").read_text()
    answer = read_conversations(tmp_path / "c.json")[0].messages[1]
    assert (answer.content, answer.stats.model) == ("re One", model_name(console.session.live_mirror.hello))


def test_failed_export_is_reported_with_name_and_reason(console, run_file, tmp_path):
    console.ask("One", "re One")
    assert "c.md was not written: No such file" in run_file(
        console.page.files.export, console.page.current, tmp_path / "missing" / "c.md"
    )


def test_import_adds_changed_copies_skips_equal_ones_and_can_be_undone(console, run_file, undo_entries, tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(to_json([conversation()]))
    assert "1 conversation imported" in run_file(console.page.files.import_file, path)
    assert console.page.current.key == "k1"
    assert "0 conversations imported from c.json. 1 conversation already here." in run_file(
        console.page.files.import_file, path
    )
    path.write_bytes(to_json([conversation(title="Other reasons")]))
    run_file(console.page.files.import_file, path)
    assert titles(console) == ["Other reasons", "Reasons"]
    assert console.chat.find("k1").title == "Reasons"
    _, undo, redo = undo_entries[-1]
    undo()
    assert titles(console) == ["Reasons"]
    redo()
    assert titles(console) == ["Other reasons", "Reasons"]
    console.chat.rename(console.chat.find("k1"), "My reasons")
    undo_entries[0][1]()
    assert "My reasons" in titles(console)  # changed since: undoing its import keeps it


def test_exporting_all_conversations_includes_those_that_are_not_loaded(console, run_file, tmp_path):
    console.ask("One", "re One")
    console.chat.add_stored([conversation()])
    console.chat.conversations[:] = [each for each in console.chat.conversations if each.key != "k1"]
    run_file(console.page.files.export_all, tmp_path / "all.json")
    assert sorted(each.title for each in read_conversations(tmp_path / "all.json")) == ["One", "Reasons"]


@pytest.mark.parametrize(
    ("chat", "roles"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}, ["user"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, ["user"]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, ["user", "assistant"]),
    ],
)
def test_lists_of_other_chat_applications_are_read(tmp_path, chat, roles):
    path = tmp_path / "c.json"
    path.write_text(json.dumps([chat]))
    (read,) = read_conversations(path)
    assert [message.role for message in read.path] == roles
    assert (read.title, read.path[0].content) == ("hi", "hi")


def file_of(**changes):
    return to_json([conversation(**changes)])


def with_message(**changes):
    data = msgspec.to_builtins(conversation())
    data["messages"][1] |= changes
    return json.dumps({"format": FORMAT, "version": 1, "conversations": [data]}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\xff\xfe{", "malformed"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"x": "y"}', "neither"),
        (b'{"format": "other"}', "its format is 'other'"),
        (b'{"format": "kvscope-conversations", "version": 9, "conversations": []}', "version 9"),
        (b'{"format": "kvscope-conversations", "version": 1, "conversations": []}', "no conversations"),
        (b'[{"messages": [{"role": "tool", "content": "x"}]}]', "role 'tool'"),
        (b'[{"messages": [{"role": "user", "content": null}]}]', "has no text"),
        (with_message(key="0"), "same key"),
        (with_message(parent="missing"), "no message with key 'missing'"),
        (with_message(parent="1"), "circle"),
        (with_message(token_ids=[-1]), "token id"),
        (with_message(written_s=1e300), "time"),
        (with_message(stats={"number": 1 << 70}), "number"),
        (with_message(content=7), "content"),
        (file_of(last="missing"), "no message with key 'missing'"),
    ],
)
def test_unacceptable_file_is_refused_in_one_line_with_name_and_reason(tmp_path, data, reason):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(BadInput) as caught:
        read_conversations(path)
    message = str(caught.value)
    assert message.startswith("bad.json was not imported: ")
    assert reason in message
    assert "\n" not in message


def test_file_with_one_bad_conversation_adds_none(console, run_file, tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(to_json([conversation(), conversation(key="k2", last="missing")]))
    assert run_file(console.page.files.import_file, path).startswith("c.json was not imported: conversation 2")
    assert titles(console) == []


def test_key_that_is_no_plain_name_is_replaced(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(file_of(key="../../escape"))
    assert "/" not in read_conversations(path)[0].key

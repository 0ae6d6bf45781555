"""Tests of the message tree: versions, the shown path, and merging two copies."""

from __future__ import annotations

from kvscope_app.views.console.conversation import Conversation, Message, merge_messages


def make_conversation():
    conversation = Conversation(key="a")
    conversation.append("user", "One")
    conversation.append("assistant", "re One")
    return conversation


def contents(conversation):
    return [message.content for message in conversation.path]


def test_message_appended_after_an_earlier_message_becomes_another_version_of_the_reply():
    conversation = make_conversation()
    prompt, answer = conversation.path
    conversation.append("user", "Two")
    conversation.last = prompt.key
    other = conversation.append("assistant", "other")
    assert contents(conversation) == ["One", "other"]
    assert conversation.versions(answer) == [answer, other]
    conversation.last = conversation.newest_end(answer)
    assert contents(conversation) == ["One", "re One", "Two"]


def test_messages_without_keys_follow_each_other_in_file_order():
    messages = [Message(role="user", content="One"), Message(role="assistant", content="re One")]
    assert contents(Conversation(key="a", messages=messages)) == ["One", "re One"]


def test_conversation_whose_messages_form_a_cycle_shows_each_message_once():
    messages = [Message(role="user", key="x", parent="y"), Message(role="user", key="y", parent="x")]
    damaged = Conversation(key="a", messages=messages, last="x")
    assert len(damaged.path) == 2
    assert damaged.newest_end(messages[0]) in ("x", "y")


def test_merging_two_conversation_copies_keeps_the_longer_text_of_every_message():
    ours = [Message(role="user", key="1", content="One"), Message(role="assistant", key="2", parent="1", content="ha")]
    theirs = [ours[0], Message(role="assistant", key="2", parent="1", content="half"), Message(role="user", key="3")]
    more = Message(role="user", key="4", parent="1", content="only ours")
    joined = merge_messages([*ours, more], theirs)
    assert [message.content for message in joined] == ["One", "half", "", "only ours"]
    assert joined[0] is ours[0]

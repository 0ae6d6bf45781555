"""Replies that nobody took: bounded in number and bytes by asking for room first."""

from __future__ import annotations

from kvscope_telemetry.messages.commands import Done
from kvscope_telemetry.sources.reply_queue import MAX_BYTES, MAX_REPLIES, ReplyQueue


def test_there_is_room_until_there_are_many_or_they_are_large() -> None:
    replies = ReplyQueue()
    assert replies.room == MAX_REPLIES
    replies.put(Done(tag=1), MAX_BYTES)
    assert replies.room == MAX_REPLIES - 1
    replies.put(Done(tag=2), 1)
    assert replies.room == 0
    assert replies.drain() == [Done(tag=1), Done(tag=2)]
    assert replies.room == MAX_REPLIES

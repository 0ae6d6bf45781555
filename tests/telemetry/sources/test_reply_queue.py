"""Replies that were not taken yet: their number and bytes are bounded by checking the capacity first."""

from __future__ import annotations

from kvscope_telemetry.messages.commands import Done
from kvscope_telemetry.sources.reply_queue import MAX_BYTES, MAX_REPLIES, ReplyQueue


def test_capacity_is_exhausted_by_number_or_bytes_of_replies() -> None:
    replies = ReplyQueue()
    assert replies.num_free_slots == MAX_REPLIES
    replies.put(Done(tag=1), MAX_BYTES)
    assert replies.num_free_slots == MAX_REPLIES - 1
    replies.put(Done(tag=2), 1)
    assert replies.num_free_slots == 0
    assert replies.drain() == [Done(tag=1), Done(tag=2)]
    assert replies.num_free_slots == MAX_REPLIES

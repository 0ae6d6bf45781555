"""Large replies handed to ZeroMQ: one per client at a time, and bounded over all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from kvscope_telemetry.messages.commands import BlockContent, BlockText, Failed
from kvscope_telemetry.messages.wire import decode_reply
from kvscope_telemetry.transport import reply_sender
from kvscope_telemetry.transport.reply_sender import BIG_REPLY_BYTES, MAX_ANSWER_BYTES, ReplySender


@dataclass
class Tracker:
    """Tracker of a reply that its client has not read."""

    done: bool = False


class Router:
    """Records what it sent: the client, and small messages."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.is_full = False

    def send(self, part: bytes, flags: int) -> None:
        if self.is_full:
            raise zmq.Again
        self.taken.append(part)


def text_of(num_bytes: int, tag: int = 0) -> BlockText:
    return BlockText(contents=(BlockContent(block=1, text="x" * num_bytes),), tag=tag)


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> list[Tracker]:
    """Trackers of all large replies, in order."""
    made: list[Tracker] = []

    def send(router: Any, data: bytes) -> Tracker:
        made.append(Tracker())
        return made[-1]

    monkeypatch.setattr(reply_sender, "send_tracked", send)
    return made


def test_client_with_most_unread_bytes_is_disconnected_beyond_the_total_bound(
    trackers: list[Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_sender, "MAX_REPLY_BYTES_IN_FLIGHT", 10 * BIG_REPLY_BYTES)
    cut: list[bytes] = []
    router: Any = Router()
    sender = ReplySender(router, lambda client: None, cut.append)
    sender.answer(b"a", text_of(4 * BIG_REPLY_BYTES))
    sender.answer(b"b", text_of(5 * BIG_REPLY_BYTES))
    assert cut == []
    sender.answer(b"c", text_of(2 * BIG_REPLY_BYTES))
    assert cut == [b"b"]
    trackers[0].done = True
    sender.answer(b"d", text_of(6 * BIG_REPLY_BYTES))
    assert cut == [b"b"], "read replies must not count"


def test_client_has_one_large_reply_in_flight(trackers: list[Tracker]) -> None:
    router: Any = Router()
    sender = ReplySender(router, lambda client: None, lambda client: None)
    for _ in range(3):
        sender.answer(b"a", text_of(BIG_REPLY_BYTES))
    assert router.taken == [b"a"]
    trackers[0].done = True
    sender.retry()
    assert router.taken == [b"a", b"a"]
    sender.answer(b"b", text_of(BIG_REPLY_BYTES))
    assert router.taken[-1] == b"b", "other clients must not wait"


def test_request_for_a_large_answer_is_refused_by_its_tag_while_too_much_waits(trackers: list[Tracker]) -> None:
    router: Any = Router()
    sender = ReplySender(router, lambda client: None, lambda client: None)
    router.is_full = True
    sender.answer(b"a", text_of(MAX_ANSWER_BYTES + 1, tag=1))
    sender.answer(b"a", text_of(10, tag=2))
    router.is_full = False
    sender.retry()
    assert router.taken[:2] == [b"a", b"a"]
    refused = decode_reply(router.taken[2])
    assert isinstance(refused, Failed)
    assert refused.tag == 2
    assert "read them before sending more" in refused.reason

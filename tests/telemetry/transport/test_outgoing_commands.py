"""Outgoing commands: in order, bounded, and answered locally if no engine takes them."""

from __future__ import annotations

import time

import pytest

from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import Abort, Control, Failed, Refused, Submit
from kvscope_telemetry.messages.wire import decode_command
from kvscope_telemetry.transport.client_sockets import MAX_WAIT_NS, MAX_WAITING, MAX_WAITING_BYTES, Outgoing


def test_commands_leave_in_order_as_the_socket_accepts_them() -> None:
    outgoing = Outgoing()
    sent: list[bytes] = []
    for i in range(5):
        outgoing.put(Abort(request_id=str(i)))
    outgoing.send_all(lambda data: len(sent) < 3 and not sent.append(data))  # type: ignore[func-returns-value]
    outgoing.send_all(lambda data: not sent.append(data))  # type: ignore[func-returns-value]
    assert [decode_command(data) for data in sent] == [Abort(request_id=str(i)) for i in range(5)]


def test_expired_command_is_answered_locally_and_never_sent() -> None:
    outgoing = Outgoing()
    for command in (Submit(request_id="r", prompt="x"), Control(action="shutdown", tag=5), Abort(request_id="q")):
        outgoing.put(command)
    assert outgoing.expired(time.monotonic_ns()) == []
    replies = outgoing.expired(time.monotonic_ns() + MAX_WAIT_NS + 1)
    assert [type(reply) for reply in replies] == [Refused, Failed, Failed]
    assert isinstance(replies[1], Failed)
    assert replies[1].tag == 5
    outgoing.send_all(lambda data: pytest.fail("an old command reached a new engine"))


def test_command_size_and_number_are_limited() -> None:
    outgoing = Outgoing()
    with pytest.raises(BadInput, match="at most"):
        outgoing.put(Submit(request_id="r", prompt="x" * (8 << 20)))
    for _ in range(MAX_WAITING):
        outgoing.put(Abort(request_id="r"))
    with pytest.raises(EngineDead):
        outgoing.put(Abort(request_id="r"))


def test_bytes_of_waiting_commands_are_bounded() -> None:
    outgoing = Outgoing()
    for _ in range(MAX_WAITING_BYTES // (7 << 20)):
        outgoing.put(Submit(request_id="r", prompt="x" * (7 << 20)))
    with pytest.raises(EngineDead, match="are queued already"):
        outgoing.put(Submit(request_id="r", prompt="x" * (7 << 20)))
    outgoing.send_all(lambda data: True)
    outgoing.put(Submit(request_id="r", prompt="x" * (7 << 20)))

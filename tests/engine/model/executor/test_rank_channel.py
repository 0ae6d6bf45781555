"""Messages between ranks arrive complete and in order; a closed connection is an error on both sides."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvscope_engine.model.executor.rank_channel import Channel, ChannelClosed, connect, listen
from kvscope_telemetry.errors import KvscopeError


def test_messages_arrive_complete_and_in_order(tmp_path: Path) -> None:
    listener = listen(tmp_path, 1)
    here = connect(tmp_path)
    there = Channel(listener.accept()[0])
    for message in (b"", b"one", bytes(50_000)):
        here.send(message)
        assert there.receive() == message
    for one in (here, there, listener):
        one.close()


def test_sending_and_receiving_on_a_rank_connection_closed_by_the_peer_raises() -> None:
    here, there = map(Channel, socket.socketpair())
    there.close()
    with pytest.raises(ChannelClosed, match="gone"):
        here.receive()
    with pytest.raises(ChannelClosed):
        here.send(bytes(1 << 20))
    here.close()


def test_absurd_message_length_is_refused() -> None:
    raw, end = socket.socketpair()
    here = Channel(end)
    raw.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        here.receive()
    raw.close()
    here.close()


def test_missing_listener_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KvscopeError, match="rank 0 is not in"):
        connect(tmp_path)

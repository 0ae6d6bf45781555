"""Authentication when nothing answers for the allow-list: no client is admitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.authenticator import ZAP_ADDRESS, ZAP_DOMAIN, Authenticator

WAIT_MS = 60_000
LET_IN = zmq.EVENT_HANDSHAKE_SUCCEEDED
TURNED_AWAY = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH) | zmq.EVENT_DISCONNECTED


@pytest.mark.parametrize("is_answered", [True, False])
def test_client_is_refused_if_the_allow_list_does_not_answer(tmp_path: Path, is_answered: bool) -> None:
    """Unless told to require an answer, libzmq admits every client that has the engine's public key."""
    ring = KeyRing(tmp_path / "keys")
    own = zmq.curve_keypair()
    authenticator = Authenticator("tcp://127.0.0.1:0", ring, Role.VIEWER)
    with zmq.Context() as context, context.socket(zmq.REP) as door, context.socket(zmq.ROUTER) as server:
        for socket in (door, server):
            socket.linger = 0
        authenticator.guard(server)
        if is_answered:
            door.bind(ZAP_ADDRESS)
        server.bind("tcp://127.0.0.1:*")
        with context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.curve_serverkey = ring.engine.public.encode()
            client.curve_publickey, client.curve_secretkey = own
            with client.get_monitor_socket(LET_IN | TURNED_AWAY) as monitor:
                client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
                if is_answered:
                    assert door.poll(WAIT_MS), "the list was not asked"
                    question = door.recv_multipart()
                    assert question[2] == ZAP_DOMAIN
                    door.send_multipart([*question[:2], b"200", b"OK", b"somebody", b""])
                assert monitor.poll(WAIT_MS), "nothing came of it"
                event = recv_monitor_message(monitor)["event"]
                client.disable_monitor()
    assert (event == LET_IN) is is_answered

"""A client's own sockets, against a real engine's."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import zmq

from kvscope_telemetry.transport.client_sockets import ClientSockets
from kvscope_telemetry.transport.server_sockets import ServerSockets

LIMIT_S = 20.0


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def until_told(sockets: ClientSockets, *, is_connected: bool) -> None:
    """What the monitor tells is read by waiting."""

    def is_so() -> bool:
        sockets.wait(10)
        return sockets.is_connected is is_connected

    until(is_so)


def test_a_connection_is_there_when_it_is_counted() -> None:
    """ZeroMQ takes messages a moment before it tells of the handshake. Who spoke then did not know that the connection
    is new: a request was under way before the engine knew whose it is, and lost a token at the next cut."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        engine = ServerSockets(f"ipc://{folder}/telemetry", on_command=print, heartbeat=lambda: None)
        sockets = ClientSockets(engine.telemetry_endpoint)
        try:
            until(lambda: int(sockets._command.get(zmq.EVENTS)) & zmq.POLLOUT)
            assert (sockets.is_connected, sockets.num_connections) == (False, 0), "the monitor was not read yet"
            until_told(sockets, is_connected=True)
            assert sockets.num_connections == 1
            engine.close()
            until_told(sockets, is_connected=False)
            engine = ServerSockets(f"ipc://{folder}/telemetry", on_command=print, heartbeat=lambda: None)
            until_told(sockets, is_connected=True)
            assert sockets.num_connections == 2
        finally:
            sockets.close()
            engine.close()

"""A client's sockets with a real engine's."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import zmq

from kvscope_telemetry.transport.client_sockets import ClientSockets
from kvscope_telemetry.transport.server_sockets import ServerSockets

LIMIT_S = 20.0


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def wait_until_connected(sockets: ClientSockets, *, is_connected: bool) -> None:
    """The monitor's messages are read by waiting."""

    def is_so() -> bool:
        sockets.wait(10)
        return sockets.is_connected is is_connected

    wait_until(is_so)


def test_connection_is_counted_before_a_message_can_be_sent() -> None:
    """ZeroMQ accepts messages shortly before it reports the handshake. A client that sent then did not know that the
    connection is new: the engine got a request without its session, and the client lost a token at the next
    disconnect.
    """
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        engine = ServerSockets(f"ipc://{folder}/telemetry", on_command=print, heartbeat=lambda: None)
        sockets = ClientSockets(engine.telemetry_endpoint)
        try:
            wait_until(lambda: int(sockets._command.get(zmq.EVENTS)) & zmq.POLLOUT)
            assert (sockets.is_connected, sockets.num_connections) == (False, 0), "the monitor was not read yet"
            wait_until_connected(sockets, is_connected=True)
            assert sockets.num_connections == 1
            engine.close()
            wait_until_connected(sockets, is_connected=False)
            engine = ServerSockets(f"ipc://{folder}/telemetry", on_command=print, heartbeat=lambda: None)
            wait_until_connected(sockets, is_connected=True)
            assert sockets.num_connections == 2
        finally:
            sockets.close()
            engine.close()

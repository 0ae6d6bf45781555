"""A client's two sockets, SUB and DEALER; the one client-side file that touches ZeroMQ.

Owns connecting, options and bounds. Every method but `wake` belongs to the one thread that reads. Knows
bytes, not messages. Reconnecting is ZeroMQ's work and goes on for as long as the sockets are open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import zmq
import zmq.auth

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES
from kvscope_telemetry.sockets.endpoints import endpoints, is_ipv6, is_loopback, require_curve
from kvscope_telemetry.sockets.wakeup import Wakeup

RECEIVE_HIGH_WATER: Final = 10_000
"""Telemetry messages that wait here for the reading thread: two seconds at 5,000 a second."""
SEND_HIGH_WATER: Final = 1_000
RECONNECT_MS: Final = (50, 1_000)
LINGER_MS: Final = 200
"""A command sent right before the end (an abort, a shutdown) gets this long to leave."""
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
"""A tcp connection that died without a word is opened anew; ipc tells at once."""


class ClientSockets:
    """Sockets to the engine at `endpoint`, connecting from construction to `close`.

    `curve_key` is the engine's public CURVE certificate; the client's own keys live as long as its sockets.
    Raises BadInput for an endpoint or a key that is not accepted.
    """

    def __init__(self, endpoint: str, *, curve_key: Path | None = None) -> None:
        addresses = endpoints(endpoint)
        require_curve(endpoint, curve_key is not None)
        server_key = None if curve_key is None else _load_public_key(curve_key)
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._telemetry = self._context.socket(zmq.SUB)
        self._command = self._context.socket(zmq.DEALER)
        self._configure(server_key, is_tcp=endpoint.startswith("tcp"), ipv6=is_ipv6(endpoint))
        self._telemetry.connect(addresses.telemetry)
        self._command.connect(addresses.command)
        self.is_same_machine = is_loopback(endpoint)

    def wait(self, timeout_ms: int, *, replies: bool = True) -> None:
        """Return when something arrived, when woken, or after `timeout_ms`; `replies`: also for those."""
        poller = zmq.Poller()
        poller.register(self._telemetry, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        if replies:
            poller.register(self._command, zmq.POLLIN)
        poller.poll(timeout_ms)
        self._wakeup.clear()

    def wake(self) -> None:
        """End `wait` now. From any thread."""
        self._wakeup.signal()

    def receive_telemetry(self, max_messages: int) -> list[bytes]:
        """What waits on the telemetry socket, oldest first."""
        return _receive(self._telemetry, max_messages)

    def receive_replies(self, max_messages: int) -> list[bytes]:
        """What waits on the command socket, oldest first."""
        return _receive(self._command, max_messages)

    def send(self, command: bytes) -> bool:
        """Hand a command to a live connection; False when there is none, or it takes no more."""
        try:
            self._command.send(command, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the command socket has a connection that takes messages."""
        return self._command.poll(0, zmq.POLLOUT) != 0

    def close(self) -> None:
        """Close both sockets and the context; returns within `LINGER_MS` and a little."""
        self._telemetry.close(linger=0)
        self._command.close(linger=LINGER_MS)
        self._context.term()
        self._wakeup.close()

    def _configure(self, server_key: bytes | None, *, is_tcp: bool, ipv6: bool) -> None:
        public, secret = zmq.curve_keypair() if server_key is not None else (b"", b"")
        for socket in (self._telemetry, self._command):
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
            socket.ipv6 = ipv6
            if is_tcp:
                socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
            if server_key is not None:
                socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
                    server_key,
                    public,
                    secret,
                )
        self._telemetry.rcvhwm = RECEIVE_HIGH_WATER
        self._telemetry.subscribe(b"")
        self._command.sndhwm = SEND_HIGH_WATER
        self._command.immediate = 1  # nothing queues for an engine that is not there


def _receive(socket: zmq.Socket[bytes], max_messages: int) -> list[bytes]:
    messages: list[bytes] = []
    try:
        for _ in range(max_messages):
            data = socket.recv(zmq.NOBLOCK)
            if socket.rcvmore:  # our messages have one part; more cannot be one of them
                data = b"".join([data, *socket.recv_multipart(zmq.NOBLOCK)])
            messages.append(data)
    except zmq.Again:
        pass
    return messages


def _load_public_key(path: Path) -> bytes:
    try:
        public, _ = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"curve key {path} is not accepted: {error}") from None
    return public

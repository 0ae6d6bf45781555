"""A client's two sockets, SUB and DEALER; the one client-side file that touches ZeroMQ.

Owns connecting, options and bounds. Every method but `wake` belongs to the one thread that reads. Knows
bytes, not messages. Reconnecting is ZeroMQ's work and goes on for as long as the sockets are open.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.keys.key_files import ClientKey
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES
from kvscope_telemetry.sockets.endpoints import endpoints, is_ipv6, require_curve
from kvscope_telemetry.sockets.handshakes import FINAL_EVENTS, HANDSHAKE_EVENTS, Handshakes
from kvscope_telemetry.sockets.wakeup import Wakeup

RECEIVE_HIGH_WATER: Final = 10_000
"""Telemetry messages that wait here for the reading thread: two seconds at 5,000 a second."""
SEND_HIGH_WATER: Final = 1_000
RECONNECT_MS: Final = (50, 1_000)
KNOCK_AGAIN_S: Final = 0.5
LINGER_MS: Final = 200
"""A command sent right before the end (an abort, a shutdown) gets this long to leave."""
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
"""A tcp connection that died without a word is opened anew; ipc tells at once."""


class ClientSockets:
    """Sockets to the engine at `endpoint`, connecting from construction to `close`.

    `key` says who the client is, and which engine it expects. Raises BadInput for an endpoint that is not
    accepted, also one outside loopback without a key.
    """

    def __init__(self, endpoint: str, *, key: ClientKey | None = None) -> None:
        addresses = endpoints(endpoint)
        require_curve(endpoint, has_keys=key is not None)
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._telemetry = self._context.socket(zmq.SUB)
        self._command = self._context.socket(zmq.DEALER)
        self._monitors = [
            (socket.get_monitor_socket(HANDSHAKE_EVENTS), Handshakes(endpoint, key), socket, address)
            for socket, address in ((self._telemetry, addresses.telemetry), (self._command, addresses.command))
        ]
        self._given_up: list[tuple[float, zmq.Socket[bytes], str]] = []
        self._configure(key, is_tcp=endpoint.startswith("tcp"), ipv6=is_ipv6(endpoint))
        self._telemetry.connect(addresses.telemetry)
        self._command.connect(addresses.command)
        self.is_ipc = endpoint.startswith("ipc")

    def wait(self, timeout_ms: int, *, replies: bool = True) -> None:
        """Return when something arrived, when woken, or after `timeout_ms`; `replies`: also for those."""
        poller = zmq.Poller()
        poller.register(self._telemetry, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        for monitor, *_ in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        if replies:
            poller.register(self._command, zmq.POLLIN)
        poller.poll(timeout_ms)
        self._wakeup.clear()
        self._watch_handshakes()
        self._knock_again()

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
    def num_connections(self) -> int:
        """How many the command socket has had: a new number is a new connection."""
        return self._monitors[1][1].num_done

    @property
    def refusal(self) -> str:
        """Why the engine does not let one of the sockets in, in one sentence; empty when nothing is wrong."""
        return self._monitors[1][1].refusal or self._monitors[0][1].refusal

    @property
    def is_connected(self) -> bool:
        """Whether the command socket has a connection that takes messages."""
        return self._command.poll(0, zmq.POLLOUT) != 0

    def close(self) -> None:
        """Close both sockets and the context; returns within `LINGER_MS` and a little."""
        for monitor, _, socket, _ in self._monitors:
            socket.disable_monitor()
            monitor.close(linger=0)
        self._telemetry.close(linger=0)
        self._command.close(linger=LINGER_MS)
        self._context.term()
        self._wakeup.close()

    def _watch_handshakes(self) -> None:
        for monitor, handshakes, socket, address in self._monitors:
            while monitor.poll(0):
                event = zmq.Event(recv_monitor_message(monitor)["event"])
                handshakes.take(event)
                if event in FINAL_EVENTS:
                    self._given_up.append((time.monotonic() + KNOCK_AGAIN_S, socket, address))

    def _knock_again(self) -> None:
        """Connect anew where ZeroMQ gave up: after a refusal it does, but keys may come to be known."""
        now_s = time.monotonic()
        for due_s, socket, address in [entry for entry in self._given_up if entry[0] <= now_s]:
            self._given_up.remove((due_s, socket, address))
            with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the address as well
                socket.disconnect(address)
            socket.connect(address)

    def _configure(self, key: ClientKey | None, *, is_tcp: bool, ipv6: bool) -> None:
        for socket in (self._telemetry, self._command):
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
            socket.ipv6 = ipv6
            if is_tcp:
                socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
            if key is not None:
                socket.curve_serverkey = key.engine.encode("ascii")
                socket.curve_publickey = key.public.encode("ascii")
                socket.curve_secretkey = key.secret.encode("ascii")
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

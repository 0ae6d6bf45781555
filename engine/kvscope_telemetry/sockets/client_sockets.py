"""A client's two sockets, SUB and DEALER; the client-side file that makes them.

Owns connecting, options and bounds. Every method but `wake` belongs to the one thread that reads. Knows
bytes, not messages. Reconnecting is ZeroMQ's work and goes on for as long as the sockets are open.
"""

from __future__ import annotations

import time
from typing import Final

import zmq

from kvscope_telemetry.keys.key_files import ClientKey
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, MAX_TELEMETRY_BYTES
from kvscope_telemetry.sockets.absence import Absence
from kvscope_telemetry.sockets.client_line import ClientLine
from kvscope_telemetry.sockets.endpoints import endpoints, is_ipv6, require_curve
from kvscope_telemetry.sockets.handshakes import Handshakes
from kvscope_telemetry.sockets.ssh_tunnel import SCHEME, SshAddress, SshTunnel
from kvscope_telemetry.sockets.tracked_send import send_tracked
from kvscope_telemetry.sockets.wakeup import Wakeup

RECEIVE_HIGH_WATER: Final = 10_000
"""Telemetry messages that wait here for the reading thread: two seconds at 5,000 a second. Fewer of large ones."""
REPLY_HIGH_WATER: Final = 1_000
SEND_HIGH_WATER: Final = 1_000
BIG_BYTES: Final = 64 << 10
"""Commands from this size leave one at a time: what an engine does not read waits where it is counted."""
RECONNECT_MS: Final = (50, 1_000)
LINGER_MS: Final = 200
"""A command sent right before the end (an abort, a shutdown) gets this long to leave."""
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
"""A tcp connection that died without a word is opened anew; ipc tells at once."""


class ClientSockets:
    """Sockets to the engine at `endpoint`, connecting from construction to `close`.

    `key` says who the client is, and which engine it expects; who does not subscribe has the command socket alone to
    listen to. Whoever watches many engines gives one `context` to all, and ends it after them: each context has threads
    of its own. Raises BadInput for an endpoint that is not accepted, also one outside loopback without a key.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: ClientKey | None = None,
        subscribes: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        require_curve(endpoint, has_keys=key is not None)
        self._tunnel = SshTunnel(SshAddress.parse(endpoint)) if endpoint.startswith(f"{SCHEME}://") else None
        self.is_ipc = endpoint.startswith("ipc")
        """Whether the engine is on this machine for certain."""
        named, endpoint = endpoint, endpoint if self._tunnel is None else self._tunnel.endpoint
        addresses = endpoints(endpoint)
        self._wakeup = Wakeup()
        self._own_context = zmq.Context() if context is None else None
        context = self._own_context or context
        assert context is not None
        self._command = context.socket(zmq.DEALER)
        telemetry = context.socket(zmq.SUB)
        _configure(telemetry, key, endpoint, MAX_TELEMETRY_BYTES)
        _configure(self._command, key, endpoint, MAX_MESSAGE_BYTES)
        if subscribes:
            telemetry.subscribe(b"")
        self._command.sndhwm = SEND_HIGH_WATER
        self._command.immediate = 1  # nothing queues for an engine that is not there
        self._telemetry_line = ClientLine(telemetry, addresses.telemetry, Handshakes(named, key), RECEIVE_HIGH_WATER)
        self._command_line = ClientLine(self._command, addresses.command, Handshakes(named, key), REPLY_HIGH_WATER)
        self._lines = (self._telemetry_line, self._command_line)
        self._pollers = {replies: self._make_poller(replies=replies) for replies in (False, True)}
        self._big_command: zmq.MessageTracker | None = None
        self._absence = Absence(endpoint)

    def wait(self, timeout_ms: int, *, replies: bool = True) -> None:
        """Return when something arrived, when woken, or after `timeout_ms`; `replies`: also for those."""
        ready = {source for source, _ in self._pollers[replies].poll(timeout_ms)}
        if self._wakeup.reader in ready:
            self._wakeup.clear()
        now_s = time.monotonic()
        for line in self._lines:
            line.look(now_s, is_told=line.monitor in ready)
        line = self._telemetry_line
        self._absence.look(now_s, is_open=line.is_open, is_up=line.is_up)

    def _make_poller(self, *, replies: bool) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.monitor, zmq.POLLIN)
            if replies or line is not self._command_line:
                poller.register(line.socket, zmq.POLLIN)
        return poller

    def wake(self) -> None:
        """End `wait` now. From any thread."""
        self._wakeup.signal()

    def receive_telemetry(self, max_messages: int) -> list[bytes]:
        """What waits on the telemetry socket, oldest first, as far as it is not too much at a time."""
        return self._telemetry_line.receive(max_messages)

    def receive_replies(self, max_messages: int) -> list[bytes]:
        """What waits on the command socket, oldest first, as far as it is not too much at a time."""
        return self._command_line.receive(max_messages)

    def send(self, command: bytes) -> bool:
        """Hand a command to a live connection; False when there is none, or it takes no more."""
        is_big = len(command) >= BIG_BYTES
        if is_big and self._big_command is not None and not self._big_command.done:
            return False
        try:
            if is_big:
                self._big_command = send_tracked(self._command, command)
            else:
                self._command.send(command, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def num_connections(self) -> int:
        """How many the command socket has had: a new number is a new connection."""
        return self._command_line.handshakes.num_done

    @property
    def refusal(self) -> str:
        """Why the engine does not let one of the sockets in, in one sentence; empty when nothing is wrong."""
        refusal = self._command_line.handshakes.refusal or self._telemetry_line.handshakes.refusal
        is_hung_up_by_ssh = self._tunnel is not None and self._tunnel.has_complained
        return "" if is_hung_up_by_ssh else refusal

    @property
    def absence(self) -> str:
        """Why there is no connection, in one sentence; empty while there is one, and before that is known."""
        return self._absence.why if self._tunnel is None else self._tunnel.why

    @property
    def num_cut(self) -> int:
        """Connections ended here because the engine sent without end, and messages that are none of ours."""
        return sum(line.num_cut for line in self._lines)

    @property
    def is_connected(self) -> bool:
        """Whether the command socket has a connection that takes messages, and that `num_connections` counts."""
        return self._command_line.is_up and bool(int(self._command.get(zmq.EVENTS)) & zmq.POLLOUT)

    def close(self) -> None:
        """Close both sockets, and the context where it is ours; returns within `LINGER_MS` and a little."""
        self._absence.close()
        self._telemetry_line.close(linger_ms=0)
        self._command_line.close(linger_ms=LINGER_MS)
        if self._own_context is not None:
            self._own_context.term()
        if self._tunnel is not None:
            self._tunnel.close()
        self._wakeup.close()


def _configure(socket: zmq.Socket[bytes], key: ClientKey | None, endpoint: str, max_bytes: int) -> None:
    socket.maxmsgsize = max_bytes
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
    socket.ipv6 = is_ipv6(endpoint)
    if endpoint.startswith("tcp"):
        socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
    if key is not None:
        socket.curve_serverkey = key.engine.encode("ascii")
        socket.curve_publickey = key.public.encode("ascii")
        socket.curve_secretkey = key.secret.encode("ascii")

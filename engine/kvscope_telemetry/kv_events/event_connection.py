"""Connection to a publisher of KV events: a SUB socket and the state of its connection attempts.

Connects, also after a refusal, and closes a connection on which a message is never completed. Must be used by the
reading thread only. Independent of the contents of messages.
"""

from __future__ import annotations

import contextlib
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.kv_events.event_endpoints import is_ipv6
from kvscope_telemetry.kv_events.event_wire import MAX_BATCH_BYTES
from kvscope_telemetry.transport.connection_watch import Connections

HIGH_WATER: Final = 64
"""Size of the receive queue in batches. Further batches are queued at the publisher, up to some thousands."""
MAX_HALF_BYTES: Final = 4 * MAX_BATCH_BYTES
"""Maximum bytes that a connection may receive between two complete messages."""
RECONNECT_MS: Final = (50, 1_000)
RECONNECT_S: Final = 1.0
WATCH_INTERVAL_S: Final = 0.25
MAX_HANG_UPS: Final = 3
HANDSHAKE_TIMEOUT_S: Final = 2.0
"""Seconds within which a new peer must complete the ZeroMQ handshake."""
MAX_PUBLISHERS: Final = 16
_FAILED: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class KVEventConnection:
    """Subscribing connection to `endpoint`; with `bind`, publishers connect to it.

    Raises EndpointInUse or BadInput if the endpoint cannot be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: bytes, *, bind: bool) -> None:
        self.num_connections = 0
        self.num_open = 0
        """Number of connected publishers."""
        self.refusal = ""
        """Reason why no publisher is connected; empty if the reason is unknown or a publisher is connected."""
        self._endpoint = endpoint
        self._is_bound = bind
        self._num_hang_ups = 0
        self._handshake_started_s: float | None = None
        """Monotonic time since which a peer is connected without having completed the handshake; None if there is no
        such peer.
        """
        self._retry_s: float | None = None
        self._poll_s = 0.0
        self._connections = Connections(MAX_PUBLISHERS, lambda seconds: MAX_HALF_BYTES, is_client=not bind)
        self._connections.listen(endpoint)
        self.socket = context.socket(zmq.SUB)
        self.socket.rcvhwm = HIGH_WATER
        self.socket.maxmsgsize = MAX_BATCH_BYTES
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = RECONNECT_MS
        self.socket.ipv6 = is_ipv6(endpoint)
        self.socket.subscribe(topic)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self._attach()

    @property
    def is_connected(self) -> bool:
        return self.num_open > 0

    def receive(self, max_messages: int) -> list[list[bytes]]:
        """Return up to `max_messages` received messages, oldest first, each as a list of its ZeroMQ frames."""
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < max_messages:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
        if messages:
            self._connections.record_activity_on_all()
        return messages

    def poll(self, now_s: float) -> None:
        """Process the socket's monitor events, and reconnect if ZeroMQ has stopped retrying."""
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            self._handle_event(zmq.Event(message["event"]), int(message["value"]), now_s)
        if self._retry_s is not None and now_s >= self._retry_s and not self._is_bound:
            self._retry_s = None
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)
        if self._handshake_started_s is not None and now_s - self._handshake_started_s > HANDSHAKE_TIMEOUT_S:
            self.refusal = f"{self._endpoint} is not a ZeroMQ socket: it does not publish KV events"
        if now_s >= self._poll_s:
            self._poll_s = now_s + WATCH_INTERVAL_S
            self._connections.watch()

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _attach(self) -> None:
        try:
            if self._is_bound:
                self.socket.bind(self._endpoint)
            else:
                self.socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise EndpointInUse(f"endpoint {self._endpoint} of KV events is in use") from None
            raise BadInput(f"endpoint {self._endpoint} of KV events is not accepted: {error.strerror}") from None

    def _handle_event(self, event: zmq.Event, value: int, now_s: float) -> None:
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._connections.accepted(value)
            self._handshake_started_s = now_s
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.closed(value)
            self._connection_ended(now_s)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_open += 1
            self.num_connections += 1
            self._handshake_started_s, self._retry_s, self.refusal, self._num_hang_ups = None, None, "", 0
        elif event in _FAILED:
            self._handshake_started_s = None
            self._retry_s = now_s + RECONNECT_S
            self.refusal = f"{self._endpoint} does not publish KV events"
        else:
            self._connection_ended(now_s)

    def _connection_ended(self, now_s: float) -> None:
        if self._handshake_started_s is None:
            self.num_open = max(0, self.num_open - 1)
            return
        self._handshake_started_s = None
        self._retry_s = now_s + RECONNECT_S  # ZeroMQ does not retry on its own after some refusals
        self._num_hang_ups += 1
        if self._num_hang_ups >= MAX_HANG_UPS:
            self.refusal = f"{self._endpoint} closes the connection: it does not publish KV events"

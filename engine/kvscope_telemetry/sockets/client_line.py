"""One of a client's sockets with all that watches over it: how handshakes went, what waits, who sends without end.

Owns connecting to one address, also after a refusal, and the end of a connection on which an engine sends what never
becomes a message. Belongs to the thread that reads.
"""

from __future__ import annotations

import contextlib
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.sockets.connection_watch import Connections
from kvscope_telemetry.sockets.handshakes import FINAL_EVENTS, HANDSHAKE_EVENTS, Handshakes
from kvscope_telemetry.sockets.intake import MAX_BURST_BYTES, Intake

KNOCK_AGAIN_S: Final = 0.5
WATCH_S: Final = 0.25
MAX_CONNECTIONS: Final = 16
"""There is one; those beside it are on their way out."""


class ClientLine:
    """`socket` connects to `address` from here on; options are set before, at most `high_water` messages wait in it."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, handshakes: Handshakes, high_water: int) -> None:
        self.socket = socket
        self.handshakes = handshakes
        events = HANDSHAKE_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        self.monitor = socket.get_monitor_socket(events)
        self._address = address
        self._intake = Intake(socket, high_water)
        max_bytes = int(socket.get(zmq.MAXMSGSIZE)) + MAX_BURST_BYTES
        self._connections = Connections(MAX_CONNECTIONS, lambda seconds: max_bytes, is_client=True)
        self._connections.listen(address)
        self._num_floods = 0
        self._retry_s: float | None = None
        self._look_s = 0.0
        self._descriptor = -1
        self.is_up = False
        """Whether the monitor told of the handshake of the connection that there is. ZeroMQ takes messages for it a
        moment before: who sent them then would speak before it knows that it is a new connection."""
        socket.connect(address)

    @property
    def is_open(self) -> bool:
        """Whether somebody took the connection, who may not speak ZeroMQ's protocol."""
        return self._descriptor >= 0

    @property
    def num_cut(self) -> int:
        """Connections ended here, and messages of several parts that were thrown away."""
        return self._connections.num_cut + self._num_floods + self._intake.num_refused

    def receive(self, max_messages: int) -> list[bytes]:
        """What waits, oldest first; see `Intake`."""
        messages = self._intake.receive(max_messages)
        if messages:
            self._connections.heard_all()
        if self._intake.is_flooded and not self._intake.is_skipping:
            self._num_floods += 1
            self._connect_anew()
        return messages

    def look(self, now_s: float, *, is_told: bool = True) -> None:
        """What became of the connection, where the monitor `is_told`; connects anew where ZeroMQ gave up, cuts where an
        engine sends without end."""
        while is_told and self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            self._take(zmq.Event(message["event"]), int(message["value"]), now_s)
        if self._retry_s is not None and now_s >= self._retry_s and not self._intake.is_skipping:
            self._retry_s = None  # after a refusal ZeroMQ does not try again by itself, but keys may come to be known
            self._connect_anew()
        if now_s >= self._look_s:
            self._look_s = now_s + WATCH_S
            self._connections.watch()

    def close(self, linger_ms: int) -> None:
        """The socket and its monitor."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)

    def _take(self, event: zmq.Event, descriptor: int, now_s: float) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connections.accepted(descriptor)
            self._descriptor, self.is_up = descriptor, False
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.closed(descriptor)
            self.is_up = self.is_up and descriptor != self._descriptor
            self._descriptor = -1 if descriptor == self._descriptor else self._descriptor
        else:
            self.handshakes.take(event)
            self.is_up = self.is_up or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in FINAL_EVENTS:
                self._retry_s = now_s + KNOCK_AGAIN_S

    def _connect_anew(self) -> None:
        """What waits is thrown away."""
        with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the address as well
            self.socket.disconnect(self._address)
        self._intake.begin()
        self.socket.connect(self._address)

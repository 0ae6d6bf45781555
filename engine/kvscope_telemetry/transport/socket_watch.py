"""Tracks the connections to the engine's sockets through ZeroMQ's socket monitors.

Owns the monitors, and decides when the number of connections and the bytes sent over each are checked.
`connection_watch.Connections` checks them, and closes connections that exceed a limit. Must be used on the thread that
owns the sockets.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Container
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import zmq

from kvscope_telemetry.transport.connection_watch import Connections

WATCH_S: Final = 0.1
MONITOR_HIGH_WATER: Final = 100
_EVENT: Final = struct.Struct("=HI")
"""Format of a monitor's message: the event and its value, which is a file descriptor."""


@dataclass(frozen=True, slots=True)
class _Watched:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connections: Connections


class SocketWatch:
    """Registers monitors with `poller` and lets `Connections` check its limits every `WATCH_S` seconds; only every
    `idle_s` seconds while there are no connections.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, idle_s: float) -> None:
        self.next_check_s = 0.0
        """Time of the next check of the limits, on the monotonic clock."""
        self._context = context
        self._poller = poller
        self._idle_s = idle_s
        self._watched: list[_Watched] = []
        self._numbers = count()

    def attach(self, socket: zmq.Socket[bytes], connections: Connections) -> None:
        """Monitor the connections to `socket`. ZeroMQ accepts no more connections while about a thousand events
        are unread.
        """
        address = f"inproc://monitor-{next(self._numbers)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = MONITOR_HIGH_WATER
        monitor.connect(address)
        self._poller.register(monitor, zmq.POLLIN)
        self._watched.append(_Watched(socket, monitor, connections))

    def detach(self, socket: zmq.Socket[bytes]) -> None:
        """Stop monitoring a socket that will be closed while the other sockets stay open. Must be called before
        that socket is closed.
        """
        for watched in [watched for watched in self._watched if watched.socket is socket]:
            self._watched.remove(watched)
            self._poller.unregister(watched.monitor)
            socket.disable_monitor()
            watched.monitor.close(linger=0)

    def read(self, ready: Container[Any]) -> None:
        for watched in self._watched:
            if watched.monitor in ready:
                _read(watched)

    def check_limits(self) -> None:
        """Enforce the limits on connections if a check is due."""
        now_s = time.monotonic()
        if now_s < self.next_check_s:
            return
        for watched in self._watched:
            if watched.socket.type == zmq.PUB:
                watched.socket.getsockopt(
                    zmq.EVENTS
                )  # process pending input first, so that closed connections are noticed
            watched.connections.watch()
        is_alone = not any(len(watched.connections) for watched in self._watched)
        self.next_check_s = now_s + (self._idle_s if is_alone else WATCH_S)

    def close(self) -> None:
        """Close the monitors. Must be called after the sockets are closed."""
        for watched in self._watched:
            watched.monitor.close(linger=0)


def _read(watched: _Watched) -> None:
    try:
        while True:
            event, _ = watched.monitor.recv_multipart(zmq.NOBLOCK)
            kind, descriptor = _EVENT.unpack(event)
            if kind == zmq.EVENT_ACCEPTED:
                watched.connections.accepted(descriptor)
            else:
                watched.connections.closed(descriptor)
    except zmq.Again:
        pass

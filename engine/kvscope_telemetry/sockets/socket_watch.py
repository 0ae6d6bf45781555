"""Keeps an eye on who is connected to the engine's sockets, told by ZeroMQ's monitors.

Owns the monitors and the times to look; what a connection may do is for `Connections` to know. Belongs to the
thread that owns the sockets.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Container
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import zmq

from kvscope_telemetry.sockets.connection_watch import Connections

WATCH_S: Final = 0.1
MONITOR_HIGH_WATER: Final = 100
_EVENT: Final = struct.Struct("=HI")
"""Of a monitor: what happened, and to which descriptor."""


@dataclass(frozen=True, slots=True)
class _Watched:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connections: Connections


class SocketWatch:
    """Its monitors are registered with `poller`. Looks every `idle_s` seconds while nobody is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, idle_s: float) -> None:
        self.next_look_s = 0.0
        """Monotonic."""
        self._context = context
        self._poller = poller
        self._idle_s = idle_s
        self._watched: list[_Watched] = []
        self._numbers = count()

    def attach(self, socket: zmq.Socket[bytes], connections: Connections) -> None:
        """Be told who connects. ZeroMQ accepts no more while it could not yet tell of about a thousand."""
        address = f"inproc://monitor-{next(self._numbers)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = MONITOR_HIGH_WATER
        monitor.connect(address)
        self._poller.register(monitor, zmq.POLLIN)
        self._watched.append(_Watched(socket, monitor, connections))

    def detach(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is closed, while the others go on."""
        for watched in [watched for watched in self._watched if watched.socket is socket]:
            self._watched.remove(watched)
            self._poller.unregister(watched.monitor)
            socket.disable_monitor()
            watched.monitor.close(linger=0)

    def read(self, ready: Container[Any]) -> None:
        """Take in what the monitors that are ready tell."""
        for watched in self._watched:
            if watched.monitor in ready:
                _read(watched)

    def look(self) -> None:
        """Cut those who send without end, when it is time; rests while nobody is there to watch."""
        now_s = time.monotonic()
        if now_s < self.next_look_s:
            return
        for watched in self._watched:
            if watched.socket.type == zmq.PUB:
                watched.socket.getsockopt(zmq.EVENTS)  # it takes in what came: who is ended in between ends
            watched.connections.watch()
        is_alone = not any(len(watched.connections) for watched in self._watched)
        self.next_look_s = now_s + (self._idle_s if is_alone else WATCH_S)

    def close(self) -> None:
        """After the sockets."""
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

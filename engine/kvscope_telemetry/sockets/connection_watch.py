"""Who is connected to a socket: how many, and how much each sent that is no whole message yet.

ZeroMQ bounds neither, but it says which descriptor a connection has, and shutting that down ends the connection as
if its peer had: what it sent half is thrown away, and nobody else notices. Knows descriptors, not ZeroMQ.

How much came over a connection the kernel tells for tcp alone. A unix socket is in a folder that only its owner
enters; there, half a message is noticed by the memory it takes, while more of it keeps coming.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HANDSHAKE_S: Final = 2.0
"""A connection younger than this may be one that never says a word."""
GREETING_BYTES: Final = 64
"""Whoever sent more than this speaks ZeroMQ's protocol."""
NUM_ASKED: Final = 8
MAX_GROWTH_BYTES: Final = 256 << 20
"""Memory that half a message over a unix socket may seem to take."""
NUM_LOOKS: Final = 3
"""How often there is more to read before half a message is believed to be what takes the memory."""
FAST_GROWTH_BYTES: Final = 16 << 20
"""Between two looks: who may be filling the memory is looked at several times then, since what came may just have been
read."""
NUM_GLANCES: Final = 25
GLANCE_S: Final = 0.001
_BYTES_RECEIVED: Final = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET: Final = 128
"""Of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


@dataclass(slots=True)
class _Connection:
    inode: int
    accepted_s: float = field(default_factory=time.monotonic)
    is_known: bool = False
    """Whether it ever sent a whole message."""
    mark_bytes: int = 0
    """Received when the last whole message was read."""
    mark_resident: int = 0
    num_looks: int = 0


class Connections:
    """Of one listening socket, by descriptor; or, with `is_client`, of one that connects.

    At most `max_connections` live. `may_send(seconds)` says how many bytes a connection may send between two whole
    messages, or, where no message is ever read, in so many seconds of its life.
    """

    def __init__(self, max_connections: int, may_send: Callable[[float], int], *, is_client: bool = False) -> None:
        self.num_cut = 0
        self.num_refused = 0
        self._max_connections = max_connections
        self._may_send = may_send
        self._connections: dict[int, _Connection] = {}
        self._is_client = is_client
        self._address: object = None
        self._resident = 0  # at the last look

    def __len__(self) -> int:
        return len(self._connections)

    def listen(self, endpoint: str) -> None:
        """Where the socket listens: `ipc://PATH` or `tcp://HOST:PORT`. Only connections to there are ever touched."""
        scheme, _, rest = endpoint.partition("://")
        self._address = rest if scheme == "ipc" else int(rest.rpartition(":")[2])

    def accepted(self, descriptor: int) -> None:
        """One more. Where that is too many, one that may be nobody is ended for it, or itself."""
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:
            return  # it is gone already
        self._connections[descriptor] = _Connection(inode, mark_resident=_resident_bytes())
        if len(self._connections) > self._max_connections:
            self.num_refused += 1
            self._end(self._least_wanted(descriptor))

    def closed(self, descriptor: int) -> None:
        """One less."""
        self._connections.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """A whole message of it was read."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.is_known = True
            connection.mark_bytes = self._received_bytes(descriptor)
            connection.num_looks = 0
            connection.mark_resident = 0

    def heard_all(self) -> None:
        """A whole message was read, and there is hardly more than one that it can be of."""
        for descriptor in self._connections:
            self.heard(descriptor)

    def cut(self, descriptor: int) -> None:
        """End a connection."""
        if descriptor in self._connections:
            self.num_cut += 1
            self._end(descriptor)

    def watch(self) -> None:
        """End every connection that sends without end. To be called a few times a second."""
        now_s, untold = time.monotonic(), dict[int, _Connection]()
        for descriptor, connection in list(self._connections.items()):
            received = self._received_bytes(descriptor)
            if received < 0:
                untold[descriptor] = connection
            elif received - connection.mark_bytes > self._may_send(now_s - connection.accepted_s):
                self.cut(descriptor)
        if untold:
            self._watch_memory(untold)

    def _received_bytes(self, descriptor: int) -> int:
        """All that ever came over a connection, -1 where the kernel does not say: of a unix socket it never does."""
        return -1 if isinstance(self._address, str) else _received_bytes(descriptor)

    def _watch_memory(self, untold: dict[int, _Connection]) -> None:
        """Of those over which the kernel does not say how much came."""
        resident = _resident_bytes()
        is_growing = resident - self._resident > FAST_GROWTH_BYTES
        self._resident = resident
        filling, silent = [], []
        for descriptor, connection in untold.items():
            connection.mark_resident = connection.mark_resident or resident
            has_unread = _unread_bytes(descriptor) > 0
            connection.num_looks += has_unread
            if resident - connection.mark_resident > MAX_GROWTH_BYTES:
                filling.append(descriptor)
                if not has_unread:
                    silent.append(descriptor)
        for descriptor in _sending_soon(silent) if is_growing else ():
            untold[descriptor].num_looks += 1
        for descriptor in filling:
            if untold[descriptor].num_looks >= NUM_LOOKS:
                self.cut(descriptor)

    def _least_wanted(self, newest: int) -> int:
        """One of those that may never say a word, so that a crowd of mute ones displaces itself; else the newest."""
        since_s = time.monotonic() - HANDSHAKE_S
        young = [
            descriptor
            for descriptor, connection in self._connections.items()
            if descriptor != newest and not connection.is_known and connection.accepted_s > since_s
        ]
        asked = random.sample(young, min(NUM_ASKED, len(young)))
        return next((descriptor for descriptor in asked if _received_bytes(descriptor) <= GREETING_BYTES), newest)

    def _end(self, descriptor: int) -> None:
        """Shut it down, if it is still the connection that was accepted: a number may be somebody else's by now."""
        connection = self._connections.pop(descriptor)
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            return
        try:
            ours = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            return
        with ours:
            if os.fstat(duplicate).st_ino == connection.inode and self._is_here(ours):
                with contextlib.suppress(OSError):  # its peer was faster
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # tell it at once
                    ours.shutdown(socket.SHUT_RDWR)

    def _is_here(self, connection: socket.socket) -> bool:
        try:
            name = connection.getpeername() if self._is_client else connection.getsockname()
        except OSError:
            return False  # its peer is gone
        return bool((name[1] if isinstance(name, tuple) else name) == self._address)


def _received_bytes(descriptor: int) -> int:
    """All that ever came over a tcp connection, -1 where the kernel does not say."""
    try:
        duplicate = os.dup(descriptor)
        with socket.socket(fileno=duplicate) as connection:
            if connection.family == socket.AF_UNIX:
                return -1
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return -1
    if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
        return -1
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0])


def _sending_soon(descriptors: list[int]) -> set[int]:
    """Which of these have more to read at one of some moments from now on."""
    found: set[int] = set()
    for _ in range(NUM_GLANCES):
        if len(found) == len(descriptors):
            break
        time.sleep(GLANCE_S)
        found.update(descriptor for descriptor in descriptors if _unread_bytes(descriptor) > 0)
    return found


def _unread_bytes(descriptor: int) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0])
    except OSError:
        return 0


def _resident_bytes() -> int:
    """Resident memory of this process; always 0 without /proc, so that it never seems to grow."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

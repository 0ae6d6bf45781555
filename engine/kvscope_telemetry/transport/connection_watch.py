"""Limits on the connections of a socket: their number, and the bytes that each sent without completing a message.

ZeroMQ limits neither, but it reports the file descriptor of a connection. Shutting that down ends the connection as if
its peer had: the partial message is discarded, and other connections are not affected. Uses file descriptors only, not
ZeroMQ.

The kernel reports the bytes received over a connection for tcp only. Unix sockets are in a directory that only their
owner can enter; there, a partial message is detected by this process's growing memory while more data arrives.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvscope_telemetry.operating_system import resident_bytes, unread_bytes

HANDSHAKE_S: Final = 2.0
"""Age in seconds up to which a connection counts as young. A young connection that has sent at most
`GREETING_BYTES` may be closed in favor of a new one.
"""
GREETING_BYTES: Final = 64
"""Maximum number of bytes that a peer may send without speaking ZeroMQ's protocol. A connection that sent more
speaks it.
"""
NUM_ASKED: Final = 8
MAX_GROWTH_BYTES: Final = 256 << 20
"""Maximum growth of resident memory that is attributed to a partial message over a unix socket before the
connection is suspected.
"""
MAX_SUSPECT_CHECKS: Final = 3
"""Number of checks that must find unread data on a connection before it is considered the cause of memory growth."""
FAST_GROWTH_BYTES: Final = 16 << 20
"""Growth of resident memory between two checks above which connections without unread data are checked several
more times. Their data may have been read just before the check.
"""
NUM_GLANCES: Final = 25
GLANCE_S: Final = 0.001
_BYTES_RECEIVED: Final = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET: Final = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


@dataclass(slots=True)
class _Connection:
    inode: int
    accepted_s: float = field(default_factory=time.monotonic)
    is_known: bool = False
    """Whether the connection has sent a complete message."""
    mark_bytes: int = 0
    """Total bytes received over the connection when its last complete message was read."""
    mark_resident: int = 0
    num_checks: int = 0


class Connections:
    """Connections of one listening socket by file descriptor, or of a connecting socket if `is_client`.

    Args:
        max_connections: Maximum number of open connections.
        may_send: Called with the seconds since a connection was accepted. Returns the number of bytes that the
            connection may send between two complete messages, or in total if it never completes one.
    """

    def __init__(self, max_connections: int, may_send: Callable[[float], int], *, is_client: bool = False) -> None:
        self.num_cut = 0
        self.num_refused = 0
        self._max_connections = max_connections
        self._may_send = may_send
        self._connections: dict[int, _Connection] = {}
        self._is_client = is_client
        self._address: object = None
        self._resident = 0  # resident bytes at the previous check

    def __len__(self) -> int:
        return len(self._connections)

    def listen(self, endpoint: str) -> None:
        """Set the endpoint, `ipc://PATH` or `tcp://HOST:PORT`. Connections of other endpoints are never shut down."""
        scheme, _, rest = endpoint.partition("://")
        self._address = rest if scheme == "ipc" else int(rest.rpartition(":")[2])

    def accepted(self, descriptor: int) -> None:
        """Add a connection. If there are too many, a young connection that has sent at most `GREETING_BYTES` is
        closed; if there is none, the new connection is closed.
        """
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:
            return  # closed already
        self._connections[descriptor] = _Connection(inode, mark_resident=resident_bytes())
        if len(self._connections) > self._max_connections:
            self.num_refused += 1
            self._end(self._connection_to_evict(descriptor))

    def closed(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def record_activity(self, descriptor: int) -> None:
        """Record that a complete message of this connection was read."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.is_known = True
            connection.mark_bytes = self._received_bytes(descriptor)
            connection.num_checks = 0
            connection.mark_resident = 0

    def record_activity_on_all(self) -> None:
        """Record that a complete message was read, on every connection. Used for sockets that normally have a
        single connection, from which the message then came.
        """
        for descriptor in self._connections:
            self.record_activity(descriptor)

    def cut(self, descriptor: int) -> None:
        if descriptor in self._connections:
            self.num_cut += 1
            self._end(descriptor)

    def watch(self) -> None:
        """Close every connection that exceeds its limit. Must be called a few times per second."""
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
        return -1 if isinstance(self._address, str) else _received_bytes(descriptor)

    def _watch_memory(self, untold: dict[int, _Connection]) -> None:
        """Check the connections in `untold`, for which the kernel does not report the number of received bytes."""
        resident = resident_bytes()
        is_growing = resident - self._resident > FAST_GROWTH_BYTES
        self._resident = resident
        filling, silent = [], []
        for descriptor, connection in untold.items():
            connection.mark_resident = connection.mark_resident or resident
            has_unread = unread_bytes(descriptor) > 0
            connection.num_checks += has_unread
            if resident - connection.mark_resident > MAX_GROWTH_BYTES:
                filling.append(descriptor)
                if not has_unread:
                    silent.append(descriptor)
        for descriptor in _sending_soon(silent) if is_growing else ():
            untold[descriptor].num_checks += 1
        for descriptor in filling:
            if untold[descriptor].num_checks >= MAX_SUSPECT_CHECKS:
                self.cut(descriptor)

    def _connection_to_evict(self, newest: int) -> int:
        """Return a young connection that has sent at most `GREETING_BYTES`, or `newest` if there is none. A
        flood of silent connections thus displaces itself.
        """
        since_s = time.monotonic() - HANDSHAKE_S
        young = [
            descriptor
            for descriptor, connection in self._connections.items()
            if descriptor != newest and not connection.is_known and connection.accepted_s > since_s
        ]
        asked = random.sample(young, min(NUM_ASKED, len(young)))
        return next((descriptor for descriptor in asked if _received_bytes(descriptor) <= GREETING_BYTES), newest)

    def _end(self, descriptor: int) -> None:
        """Shut a connection down if `descriptor` still refers to it. The system may have reused the descriptor
        for another file.
        """
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
                with contextlib.suppress(OSError):  # the peer closed it first
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset immediately
                    ours.shutdown(socket.SHUT_RDWR)

    def _is_here(self, connection: socket.socket) -> bool:
        try:
            name = connection.getpeername() if self._is_client else connection.getsockname()
        except OSError:
            return False  # the peer closed it
        return bool((name[1] if isinstance(name, tuple) else name) == self._address)


def _received_bytes(descriptor: int) -> int:
    """Return the total bytes received over a tcp connection; -1 if the kernel does not report it."""
    try:
        duplicate = os.dup(descriptor)
        with socket.socket(fileno=duplicate) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return -1
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):  # AttributeError: a system without TCP_INFO
        return -1
    if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
        return -1
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0])


def _sending_soon(descriptors: list[int]) -> set[int]:
    """Return the descriptors that have unread data at one of `NUM_GLANCES` checks, which are `GLANCE_S` apart."""
    found: set[int] = set()
    for _ in range(NUM_GLANCES):
        if len(found) == len(descriptors):
            break
        time.sleep(GLANCE_S)
        found.update(descriptor for descriptor in descriptors if unread_bytes(descriptor) > 0)
    return found

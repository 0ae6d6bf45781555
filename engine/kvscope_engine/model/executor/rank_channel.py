"""Exchanges length-prefixed messages between two processes over a Unix socket. Detects immediately that the other
process has closed its end.

Must not depend on message types. The socket is in a folder that only its user can access.
"""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError

SOCKET_FILE: Final = "channel"
SOCKET_TIMEOUT_S: Final = 60.0
"""Timeout in seconds for sending a message, or for receiving the next part of one."""
MAX_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct("<I")


class ChannelClosed(KvscopeError): ...


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._socket.settimeout(SOCKET_TIMEOUT_S)

    def fileno(self) -> int:
        """Return the file descriptor for `select`. It is readable when a message has arrived or the other process has
        closed its end.
        """
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise ChannelClosed(f"it takes no messages ({error})") from error

    def receive(self) -> bytes:
        """Return the next message. Raises ChannelClosed, also if a part of the message is late (`SOCKET_TIMEOUT_S`)."""
        try:
            (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
            if length > MAX_BYTES:
                raise ChannelClosed(f"a message of {length} bytes is not accepted")
            return self._receive_exactly(length)
        except OSError as error:
            raise ChannelClosed(f"it sends no messages ({error})") from error

    def close(self) -> None:
        self._socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = self._socket.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise ChannelClosed("it is gone")
            data += chunk
        return bytes(data)


def listen(folder: Path, backlog: int) -> socket.socket:
    """Return a socket that accepts connections of `connect`. `folder` must be accessible to the user only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(folder / SOCKET_FILE))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise KvscopeError(f"ranks cannot meet in {str(folder)!r}: {error} (TMPDIR names another folder)") from error
    return listener


def connect(folder: Path) -> Channel:
    """Connect to the process that listens in `folder`. Raises KvscopeError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(folder / SOCKET_FILE))
    except OSError as error:
        connection.close()
        raise KvscopeError(f"rank 0 is not in {str(folder)!r}: {error}") from error
    return Channel(connection)

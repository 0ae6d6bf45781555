"""One connection to an engine's HTTP server, for one question, which another thread may cut.

Owns the socket. Says what every question has in its head: who asks, and the API key.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Final

from kvscope_telemetry.about import program_version
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.external.address import ExternalAddress

_USER_AGENT: Final = f"kvscope/{program_version()}".replace(" ", "-")


class HttpConnection:
    """`ask` once, read, `close`. `timeout_s` is how long any wait of it may take; `cut` ends one that goes on."""

    def __init__(self, address: ExternalAddress, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        self._address = address
        host, port = address.host, address.port
        self._connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if tls is None
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
        )
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # the connection forgets it while the answer is still read
        self._is_cut = False

    def ask(
        self,
        path: str,
        body: bytes | None,
        accept: str,
        head: Mapping[str, str] | None = None,
        wait_s: float | None = None,
    ) -> http.client.HTTPResponse:
        """GET, or POST of `body` as JSON: the answer, whose content is still to be read. Raises OSError and
        HTTPException. `wait_s` is how long any wait may take once there is a connection, where it is another."""
        self._connect()
        if wait_s is not None:
            self._connection.sock.settimeout(wait_s)
        address = self._address
        headers = {"Accept": accept, "User-Agent": _USER_AGENT, **(head or {})}
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._connection.request("GET" if body is None else "POST", address.path + path, body, headers)
        return self._connection.getresponse()

    @property
    def is_connected(self) -> bool:
        """Whether there is somebody at the other end."""
        return self._socket is not None

    def check(self) -> None:
        """Raise ConnectionAbortedError once it was cut."""
        if self._is_cut:
            raise ConnectionAbortedError("cut off")

    def cut(self) -> None:
        """From any thread: whoever waits for something of it waits no longer."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Of the thread that asked."""
        with self._lock:
            self._socket = None
        self._connection.close()

    def _connect(self) -> None:
        self.check()
        self._connection.connect()
        with self._lock:
            self._socket = self._connection.sock
        self.check()


def tls_of(address: ExternalAddress) -> ssl.SSLContext | None:
    """None where it is not asked for. Raises BadInput for a file of certificates that will not do."""
    if not address.tls:
        return None
    try:
        return ssl.create_default_context(cafile=address.ca or None)
    except (OSError, ValueError) as error:
        raise BadInput(f"ca={address.ca!r} is not accepted: a file of certificates in PEM ({error})") from None

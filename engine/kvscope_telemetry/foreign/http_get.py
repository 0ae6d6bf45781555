"""One GET (or POST) to an engine's HTTP server: bounded in time and size, and every way that it fails is one sentence.

Owns the connection while it lasts. Another thread may cancel it. Knows nothing of what the answer means.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from typing import Final

from kvscope_telemetry.about import program_version
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.foreign.address import ForeignAddress

MAX_BYTES: Final = 16 << 20
"""Of an answer."""
TIMEOUT_S: Final = 10.0
"""For all of it."""
_CHUNK_BYTES: Final = 1 << 16
_OK: Final = 200
_REDIRECTS: Final = range(300, 400)
_REFUSALS: Final = (401, 403)
_USER_AGENT: Final = f"kvscope/{program_version()}".replace(" ", "-")


class NoAnswer(KvscopeError):
    """There is no answer that could be read; why, in one sentence. `status` is HTTP's, 0 where there was none."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether there is a server, and it does not let us in."""
        return self.status in _REFUSALS


class HttpGet:
    """Of one server. Raises BadInput for a file of certificates that will not do."""

    def __init__(self, address: ForeignAddress, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES) -> None:
        self._address = address
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._tls = _tls(address.ca) if address.tls else None
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._is_cancelled = False
        self._is_late = False

    def get(self, path: str, body: bytes | None = None) -> tuple[str, bytes]:
        """Type and content of what is at `path`; with a `body` it is posted as JSON. Raises NoAnswer."""
        url = self._address.url(path)
        self._is_late = False
        deadline = threading.Timer(self._timeout_s, self._give_up)
        deadline.daemon = True
        deadline.start()
        try:
            return self._ask(url, self._address.path + path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = self._is_late or isinstance(error, TimeoutError)
            raise NoAnswer(_late(url, self._timeout_s) if is_late else _why(url, error)) from None
        finally:
            deadline.cancel()
            self._close()

    def cancel(self) -> None:
        """From any thread: end what is being asked, and all that is asked from now on."""
        self._is_cancelled = True
        self._wake_reader()

    def _ask(self, url: str, path: str, body: bytes | None) -> tuple[str, bytes]:
        connection = self._connect()
        headers = {"Accept": "text/plain, application/json", "User-Agent": _USER_AGENT}
        if self._address.api_key:
            headers["Authorization"] = f"Bearer {self._address.api_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request("GET" if body is None else "POST", path, body, headers)
        with connection.getresponse() as answer:
            if answer.status != _OK:
                raise NoAnswer(_refused(url, answer.status, bool(self._address.api_key)), answer.status)
            return answer.headers.get_content_type(), self._read(url, answer)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=self._timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        )
        with self._lock:
            self._connection = connection
        self._check_goes_on()
        connection.connect()
        self._check_goes_on()
        return connection

    def _check_goes_on(self) -> None:
        if self._is_cancelled or self._is_late:
            raise ConnectionAbortedError("cut off")

    def _read(self, url: str, answer: http.client.HTTPResponse) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while part := answer.read(_CHUNK_BYTES):
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise NoAnswer(f"{url} answers with more than {self._max_bytes >> 20} MB: that is not read")
            parts.append(part)
        self._check_goes_on()
        if answer.length:
            raise ConnectionResetError("the rest is missing")
        return b"".join(parts)

    def _give_up(self) -> None:
        self._is_late = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        with self._lock:
            sock = None if self._connection is None else self._connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _tls(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise BadInput(f"ca={ca!r} is not accepted: a file of certificates in PEM ({error})") from None


def _refused(url: str, status: int, has_key: bool) -> str:
    if status in _REFUSALS:
        asked = "does not accept the API key" if has_key else "wants an API key: give it by --api-key-file"
        return f"{url} {asked} (HTTP {status})"
    if status in _REDIRECTS:
        return f"{url} sends us elsewhere (HTTP {status}), which is not followed: give the address of the server itself"
    if status == http.client.NOT_FOUND:
        return f"{url} is not there (HTTP 404)"
    return f"{url} answers with HTTP {status}"


def _late(url: str, timeout_s: float) -> str:
    return f"{url} did not answer within {timeout_s:g} s"


def _why(url: str, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{url}: its certificate is not trusted ({error.verify_message}); --tls-ca FILE names who signed it"
    if isinstance(error, ssl.SSLError):
        return f"{url} does not speak TLS as we do ({error.reason or 'the connection broke'}): is --tls right there?"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {url}"
    if isinstance(error, socket.gaierror):
        return f"{url}: there is no such host"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead | ConnectionError):
        return f"{url} hung up before its answer was whole"
    if isinstance(error, http.client.HTTPException):
        return f"{url} does not speak HTTP ({type(error).__name__}): is it another port?"
    return f"{url} cannot be reached ({getattr(error, 'strerror', None) or type(error).__name__})"

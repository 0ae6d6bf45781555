"""HTTP client for an engine's server, based on httpx.

Requests are bounded in time and size and can be cancelled from another thread. Each failure is described in one
sentence. Each request has its own connection, because cancelling shuts its socket down. Independent of the content of
answers. Importing httpx takes 0.25 s, so the thread that sends the first request imports it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvscope_telemetry.collectors.server_address import ServerAddress
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.program_version import program_version

if TYPE_CHECKING:
    import httpx

MAX_BYTES: Final = 16 << 20
"""Maximum size of an HTTP response body in bytes."""
TIMEOUT_S: Final = 10.0
"""Timeout in seconds of a whole `get`. For other requests, it limits the time to connect."""
OK: Final = 200
NOT_FOUND: Final = 404
REFUSALS: Final = (401, 403)
"""HTTP statuses of a server that requires credentials or rejects the ones sent."""
_REDIRECTS: Final = range(300, 400)
_THIS_MACHINE: Final = ("all://localhost", "all://127.0.0.1", "all://[::1]")
"""httpx patterns of hosts that are never reached through a proxy, because the proxy would connect to its own
machine instead.
"""
_USER_AGENT: Final = f"kvscope/{program_version()}".replace(" ", "-")


class NoAnswer(KvscopeError):
    """Raised if no readable answer was received. The message gives the reason in one sentence; `status` is the
    HTTP status, or 0.
    """

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        return self.status in REFUSALS


class HttpClient:
    """HTTP client of the server at `address`. Thread-safe. Raises BadInput if its certificate file cannot be used."""

    def __init__(self, address: ServerAddress, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES) -> None:
        self.address = address
        self.timeout_s, self._max_bytes = timeout_s, max_bytes
        self._tls = _ssl_context(address)
        self._lock = threading.Lock()
        self._exchanges: set[HttpExchange] = set()
        self._is_cancelled = False

    def get(self, path: str, body: bytes | None = None) -> tuple[str, bytes]:
        """Return the content type and body at `path`. Sends GET, or POST if there is a JSON `body`. Raises NoAnswer."""
        url = self.address.url(path)
        exchange = HttpExchange(self)
        with self._lock:
            self._exchanges.add(exchange)
            if self._is_cancelled:
                exchange.abort()
        deadline = threading.Timer(self.timeout_s, exchange.abandon)
        deadline.daemon = True
        deadline.start()
        try:
            with exchange.send(path, body, accept="text/plain, application/json") as answer:
                if answer.status_code != OK:
                    why = why_refused(url, answer.status_code, self.address.refusal)
                    raise NoAnswer(why, answer.status_code)
                return content_type(answer), self._read(url, answer)
        finally:
            deadline.cancel()
            with self._lock:
                self._exchanges.discard(exchange)

    def cancel(self) -> None:
        """Cancel all requests of `get`, current and future. Thread-safe."""
        with self._lock:
            self._is_cancelled = True
            for exchange in self._exchanges:
                exchange.abort()

    @cached_property
    def httpx_client(self) -> httpx.Client:
        """Client configured with the environment's proxies, and with the certificates of the address or of the
        system.
        """
        import httpx

        # Identity: the size limit applies to the bytes received.
        headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
        return httpx.Client(
            headers=headers | self.address.authorization,
            verify=self._tls or False,  # without TLS it is unused, as redirects are not followed
            timeout=self.timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,  # the API key is for this server only
            mounts=dict.fromkeys(_THIS_MACHINE),
            trust_env=not self.address.is_loopback,  # a proxy would take 127.0.0.2 for itself and see the API key
        )

    def _read(self, url: str, answer: httpx.Response) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        for part in answer.iter_raw():
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise NoAnswer(f"{url} answers with more than {self._max_bytes >> 20} MB, which is not read")
            parts.append(part)
        return b"".join(parts)


class HttpExchange:
    """One HTTP request and its answer. `send` may be called once; `abort` and `abandon` are thread-safe."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._peer = ""  # host and port of the connection
        self._is_aborted = self._is_late = False

    @contextlib.contextmanager
    def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        accept: str,
        head: Mapping[str, str] | None = None,
        wait_s: float | None = None,
    ) -> Iterator[httpx.Response]:
        """Send GET, or POST of `body` as JSON, and yield the answer with its body still unread.

        Raises NoAnswer for all failures, including those while the body is read. `wait_s` replaces the client's timeout
        for each wait after the connection is established.
        """
        import httpx

        client, url = self._client, self._client.address.url(path)
        headers = {"Accept": accept, **(head or {})}
        if body is not None:
            headers["Content-Type"] = "application/json"
        timeout = httpx.Timeout(wait_s or client.timeout_s, connect=client.timeout_s)
        try:
            with client.httpx_client.stream(
                "GET" if body is None else "POST",
                url,
                content=body,
                headers=headers,
                timeout=timeout,
                extensions={"trace": self._trace},
            ) as answer:
                if (encoding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
                    raise NoAnswer(f"{url} answers compressed ({encoding:.40}), although that was not asked for")
                yield answer
                self._check()
        except httpx.TimeoutException as error:
            is_connected = not isinstance(error, httpx.ConnectTimeout)
            raise NoAnswer(why_late(url, wait_s if wait_s and is_connected else client.timeout_s)) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            if isinstance(error, KvscopeError):
                raise
            why = why_late(url, client.timeout_s) if self._is_late else why_broken(url, error, self._proxy)
            raise NoAnswer(why) from None
        finally:
            with self._lock:
                self._socket = None

    def abort(self) -> None:
        """Shut down the connection, so that all waits for it end with an error."""
        with self._lock:
            self._is_aborted = True
            self._shut_down()

    def abandon(self) -> None:
        """Abort because the deadline has passed."""
        self._is_late = True
        self.abort()

    @property
    def _proxy(self) -> str:
        """Host and port of the proxy in use; empty if the connection is direct."""
        address = self._client.address
        return "" if self._peer in ("", f"{address.host}:{address.port}") else self._peer

    def _check(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError("kvscope closed the connection")

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Handle httpx's trace events. They give the only access to the socket before an answer has begun."""
        if event.endswith("connect_tcp.started"):
            self._peer = f"{info['host']}:{info['port']}"
        elif event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self._is_aborted:
                    self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def content_type(answer: httpx.Response) -> str:
    """Return the content type of an answer without parameters such as `charset`."""
    return str(answer.headers.get("Content-Type", "text/plain")).partition(";")[0].strip().lower()


def why_refused(url: str, status: int, refusal: str) -> str:
    """Return a sentence about an HTTP status other than success. `refusal` is `ServerAddress.refusal`."""
    if status in REFUSALS:
        return f"{url} {refusal} (HTTP {status})"
    if status in _REDIRECTS:
        return (
            f"{url} redirects (HTTP {status}), which is not followed: use the server's own address, and --tls for https"
        )
    if status == NOT_FOUND:
        return f"{url} not found (HTTP 404)"
    return f"{url} answers with HTTP {status}"


def why_no_stream(url: str, status: int, kind: str, message: str, refusal: str) -> str:
    """Return a sentence that says why an answer is not an event stream: by its HTTP status, its content type,
    or the server's message.
    """
    if status == OK:
        description = "a web page" if kind == "text/html" else f"{kind:.60}"
        return f"{url} answers with {description} instead of an event stream: is it another program's port?"
    if message:
        return f"{url} answers with HTTP {status}: {message}"
    return why_refused(url, status, refusal)


def why_late(url: str, timeout_s: float) -> str:
    return f"{url} did not answer within {timeout_s:g} s"


def why_broken(url: str, error: Exception, proxy: str = "") -> str:
    """Return a sentence about a connection error. The operating system's error is found in the httpx error's
    chain of causes.
    """
    import httpx

    root: BaseException = error
    while not isinstance(root, OSError) and (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    server = f"{url} by the proxy {proxy}" if proxy else url
    if isinstance(root, ssl.SSLCertVerificationError):
        return (
            f"{server}: its certificate is not trusted ({root.verify_message}); use --tls-ca FILE with its "
            "certificate authority"
        )
    if isinstance(root, ssl.SSLError):
        return f"{server}: TLS failed ({root.reason or 'the connection broke'}): does this server use TLS (--tls)?"
    if isinstance(root, ConnectionRefusedError):
        return f"nobody listens at {f'the proxy {proxy}, which is in the way to {url}' if proxy else url}"
    if isinstance(root, socket.gaierror):
        return f"{server}: unknown host"
    if isinstance(error, httpx.RemoteProtocolError) and "disconnected" in str(error):
        return f"{server} closed the connection without an answer in HTTP: is it another port?"
    is_cut = isinstance(error, httpx.RemoteProtocolError) and "closed connection" in str(error)
    if is_cut or isinstance(root, ConnectionError):
        return f"{server} closed the connection before its answer was complete"
    if isinstance(error, httpx.ProxyError):
        return f"{server}: the proxy refuses it ({' '.join(str(error).split()):.100})"
    if isinstance(error, httpx.RemoteProtocolError):
        return f"{server} does not answer in HTTP ({type(root).__name__}): is it another port?"
    return f"{server} cannot be reached ({getattr(root, 'strerror', None) or type(root).__name__})"


def _ssl_context(address: ServerAddress) -> ssl.SSLContext | None:
    if not address.tls:
        return None
    try:
        return ssl.create_default_context(cafile=address.ca or None)
    except (OSError, ValueError) as error:
        raise BadInput(f"ca={address.ca!r} is not accepted: must be a file of certificates in PEM ({error})") from None

"""One GET (or POST) to an engine's HTTP server: bounded in time and size, and every way that it fails is one sentence.

Owns the connection while it lasts. Another thread may cancel it. Knows nothing of what the answer means.
"""

from __future__ import annotations

import http.client
import threading
from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.external.address import ExternalAddress
from kvscope_telemetry.external.http.line import HttpConnection, tls_of
from kvscope_telemetry.external.http.reasons import REFUSALS, why_broken, why_late, why_refused

MAX_BYTES: Final = 16 << 20
"""Of an answer."""
TIMEOUT_S: Final = 10.0
"""For all of it."""
_CHUNK_BYTES: Final = 1 << 16
_OK: Final = 200


class NoAnswer(KvscopeError):
    """There is no answer that could be read; why, in one sentence. `status` is HTTP's, 0 where there was none."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether there is a server, and it does not let us in."""
        return self.status in REFUSALS


class HttpGet:
    """Of one server. Raises BadInput for a file of certificates that will not do."""

    def __init__(self, address: ExternalAddress, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES) -> None:
        self._address = address
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._tls = tls_of(address)
        self._lock = threading.Lock()
        self._line: HttpConnection | None = None
        self._is_cancelled = False
        self._is_late = False

    def get(self, path: str, body: bytes | None = None) -> tuple[str, bytes]:
        """Type and content of what is at `path`; with a `body` it is posted as JSON. Raises NoAnswer."""
        url = self._address.url(path)
        self._is_late = False
        deadline = threading.Timer(self._timeout_s, self._give_up)
        deadline.daemon = True
        line = self._begin()
        deadline.start()
        try:
            return self._ask(line, url, path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = self._is_late or isinstance(error, TimeoutError)
            raise NoAnswer(why_late(url, self._timeout_s) if is_late else why_broken(url, error)) from None
        finally:
            deadline.cancel()
            self._end(line)

    def cancel(self) -> None:
        """From any thread: end what is being asked, and all that is asked from now on."""
        self._is_cancelled = True
        self._cut()

    def _ask(self, line: HttpConnection, url: str, path: str, body: bytes | None) -> tuple[str, bytes]:
        with line.ask(path, body, "text/plain, application/json") as answer:
            if answer.status != _OK:
                has_key = bool(self._address.api_key)
                raise NoAnswer(why_refused(url, answer.status, has_key=has_key), answer.status)
            return answer.headers.get_content_type(), self._read(line, url, answer)

    def _read(self, line: HttpConnection, url: str, answer: http.client.HTTPResponse) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while part := answer.read(_CHUNK_BYTES):
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise NoAnswer(f"{url} answers with more than {self._max_bytes >> 20} MB, which is not read")
            parts.append(part)
        line.check()
        if answer.length:
            raise ConnectionResetError("the rest is missing")
        return b"".join(parts)

    def _give_up(self) -> None:
        self._is_late = True
        self._cut()

    def _begin(self) -> HttpConnection:
        line = HttpConnection(self._address, self._tls, self._timeout_s)
        with self._lock:
            self._line = line
        if self._is_cancelled:
            line.cut()
        return line

    def _cut(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.cut()

    def _end(self, line: HttpConnection) -> None:
        with self._lock:
            self._line = None
        line.close()

"""Finds out why a connection fails, by attempting a separate plain connection: ZeroMQ does not report reasons.

Owns that attempt and its retries. Never blocks: host names are resolved on a separate thread. Must be used on the
reading thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from typing import Any, Final

from kvscope_telemetry.transport.bind_address import IpcAddress, parse_bind_address

FIRST_S: Final = 0.3
"""Time in seconds before the first attempt. A running engine answers sooner, so that no attempt is needed."""
SILENT_S: Final = 1.5
"""Time after which a peer that has not answered is reported as silent."""
_AGAIN_S: Final = (1.0, 15.0)
"""Shortest and longest pause between connection attempts; the pause doubles each time."""
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


class UnreachableEngine:
    """Finds out why one endpoint cannot be reached. Call `poll` regularly while there is no connection."""

    def __init__(self, endpoint: str) -> None:
        self.why = ""
        """Sentence saying why the engine cannot be reached; empty if no problem was found."""
        address = parse_bind_address(endpoint)
        self._path, self._host, self._port = "", "", 0
        if isinstance(address, IpcAddress):
            self._path = str(address.folder / "telemetry")
        else:
            self._host, self._port = address.host.strip("[]"), address.port
        self._next_s: float | None = None
        self._pause_s = _AGAIN_S[0]
        self._lookup: _Lookup | None = None
        self._trying: socket.socket | None = None
        self._since_s = 0.0

    def poll(self, now_s: float, *, is_open: bool, is_up: bool) -> None:
        """Continue to determine the reason. Never blocks.

        Args:
            is_open: Whether ZeroMQ has a connection.
            is_up: Whether the peer speaks ZeroMQ's protocol.
        """
        if is_up:
            self._restart()
        elif self._next_s is None:
            self._next_s = self._since_s = now_s + FIRST_S
        elif is_open:
            self._end_attempt()
            if now_s - self._since_s >= SILENT_S:
                self.why = f"something listens at {self._named}, but it is not a kvscope engine"
        elif self._lookup is not None or self._trying is not None:
            self._continue_attempt(now_s)
        elif now_s >= self._next_s:
            self._try(now_s)

    def close(self) -> None:
        self._end_attempt()

    @property
    def _named(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return self._path or f"{host}:{self._port}"

    def _restart(self) -> None:
        self._end_attempt()
        self.why, self._next_s, self._pause_s = "", None, _AGAIN_S[0]

    def _end_attempt(self) -> None:
        trying, self._trying, self._lookup = self._trying, None, None
        if trying is not None:
            trying.close()

    def _try(self, now_s: float) -> None:
        self._since_s = now_s
        self._next_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _AGAIN_S[1])
        if self._path:
            self._connect(socket.AF_UNIX, self._path)
        else:
            self._lookup = _Lookup(self._host, self._port)
            self._continue_attempt(now_s)

    def _continue_attempt(self, now_s: float) -> None:
        is_late = now_s - self._since_s >= SILENT_S
        if self._lookup is not None:
            if not self._lookup.is_over:
                self.why = f"looking up host {self._host!r}" if is_late else self.why
                return
            found, self._lookup = self._lookup, None
            if found.address is None:
                self.why = f"unknown host {self._host!r} ({found.failure})"
                return
            self._connect(*found.address)
        if self._trying is None:
            return
        _, writable, _ = select.select((), (self._trying,), (), 0)
        if writable:
            self._record_result(self._trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        elif is_late:
            self.why = f"{self._named} does not answer: check the address, and any firewall in between"
            self._end_attempt()

    def _connect(self, family: int, where: Any) -> None:
        self._trying = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._trying.setblocking(False)
        try:
            code = self._trying.connect_ex(where)
        except OSError as error:  # the path is too long for a socket
            code = error.errno or errno.EINVAL
        if code not in (errno.EINPROGRESS, errno.EAGAIN):
            self._record_result(code)

    def _record_result(self, code: int) -> None:
        self._end_attempt()
        self.why = "" if code == 0 else self._because(code)

    def _because(self, code: int) -> str:
        words = os.strerror(code).lower()
        if self._path and code in _ABSENT:
            return f"no socket file {self._path}: no engine was started there, or it has stopped"
        if code == errno.ECONNREFUSED:
            ended = ": its engine has stopped" if self._path else ""
            return f"nothing listens on {self._named} ({words}){ended}"
        if code in (errno.EACCES, errno.EPERM):
            return f"{self._named} may not be opened ({words})"
        return f"{self._named} cannot be reached ({words})"


class _Lookup:
    """Finds the first address of a host name on a separate thread, because name resolution may take many seconds."""

    def __init__(self, host: str, port: int) -> None:
        self.address: tuple[int, Any] | None = None
        self.failure = ""
        self._host, self._port = host, port
        with contextlib.suppress(socket.gaierror):  # most hosts are numeric addresses, which need no thread
            self.address = self._look_up(socket.AI_NUMERICHOST)
        self._thread = threading.Thread(target=self._run, name="kvscope-lookup", daemon=True)
        if self.address is None:
            self._thread.start()

    @property
    def is_over(self) -> bool:
        return self.address is not None or bool(self.failure)

    def _run(self) -> None:
        try:
            self.address = self._look_up(0)
        except OSError as error:
            self.failure = (error.strerror or str(error)).lower()
        except UnicodeError:
            self.failure = "invalid name"

    def _look_up(self, flags: int) -> tuple[int, Any]:
        family, _, _, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)[0]
        return family, where

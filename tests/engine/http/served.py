"""The HTTP API in this process with a fake engine, over real sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.server import fake_engine

from kvscope_engine.http.api_state import HttpLimits, HttpSettings
from kvscope_engine.http.http_server import HttpServer
from kvscope_engine.http.listen_address import listen
from kvscope_engine.server.service import EngineService
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.errors import KvscopeError

WAIT_S = 60.0


def wait_for(holds: Callable[[], Any], what: str) -> None:
    """Wait until `holds()` is true; fail with `what` after the timeout."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.005)


class Served:
    """An engine (a fake one without `build`) and the API in front of it, each on its own thread."""

    def __init__(
        self,
        *,
        limits: HttpLimits | None = None,
        api_key: str = "",
        build: Callable[..., Any] | None = None,
        keys: KeyRing | None = None,
        key: Path | None = None,
        trust_forwarded: bool = False,
        allowed_origins: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """With `keys`, the engine is on TCP and admits only these keys, one of which the API uses."""
        self.engine: Any = None
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))
        self._endpoint = f"ipc://{self.folder}" if keys is None else "tcp://127.0.0.1:0"
        self._keys = keys
        self._build = build or fake_engine.builder(fake_engine.FakeEngineOptions(**options))
        self._threads: list[threading.Thread] = []
        self.start_engine()
        self.listener = listen("127.0.0.1:0")
        self.address: tuple[str, int] = self.listener.getsockname()
        endpoint = self._endpoint if keys is None else self.service.telemetry_endpoint
        settings = HttpSettings(
            endpoint=endpoint,
            key=key,
            api_key=api_key,
            limits=limits or HttpLimits(),
            trust_forwarded=trust_forwarded,
            allowed_origins=allowed_origins,
        )
        self.server = HttpServer(settings, self.listener)
        self.api = self.server.app.state.api
        self._http = threading.Thread(target=self.server.run)
        self._http.start()
        if keys is None:
            self.wait_ready()

    def start_engine(self) -> None:
        self.service = EngineService(self._endpoint, self._remember, keys=self._keys)
        self._threads.append(threading.Thread(target=self._run_engine, args=(self.service,)))
        self._threads[-1].start()

    def stop_engine(self) -> None:
        self.service.stop()
        self._threads[-1].join()

    def wait_ready(self) -> None:
        wait_for(
            lambda: self.api.engine_client.status and self.api.engine_client.status.phase == "ready",
            "an engine that is ready",
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_S)

    def send(self, head: str, body: bytes = b"") -> socket.socket:
        """Return a connection on which the head and body were sent."""
        connection = self.connect()
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        return connection

    def post(self, path: str, body: Any, *headers: str) -> socket.socket:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
        return self.send("\n".join([*lines, f"Content-Length: {len(data)}"]), data)

    def ask(self, path: str, body: Any = None, *headers: str) -> tuple[int, Any]:
        """Return status and JSON of the answer."""
        if body is None:
            connection = self.send(
                "\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "Connection: close"])
            )
        else:
            connection = self.post(path, body, *headers, "Connection: close")
        return answer_on(connection)

    def close(self) -> None:
        if self.engine is not None:
            getattr(self.engine, "may_step", threading.Event()).set()
        self.server.stop()
        self._http.join()
        self.listener.close()
        self.stop_engine()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run_engine(self, service: EngineService) -> None:
        with contextlib.suppress(KvscopeError):  # raised on purpose by a test and reported to clients
            service.run()

    def _remember(self, *args: Any) -> Any:
        self.engine = self._build(*args)
        return self.engine


def read_all(connection: socket.socket) -> bytes:
    """Read until the other end closes, then close the connection."""
    data = b""
    with connection:
        try:
            while more := connection.recv(1 << 16):
                data += more
        except ConnectionResetError:  # the server closed while our data was unread
            pass
    return data


def answer_on(connection: socket.socket) -> tuple[int, Any]:
    """Return status and JSON of the answer, read until the end."""
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)

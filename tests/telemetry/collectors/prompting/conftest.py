"""Fixtures for prompters: a fake OpenAI server on real sockets, and prompters that are closed with their test."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.prompting.prompter import Prompter
from kvscope_telemetry.messages.commands import Failed, Finished, Refused, Reply

WAIT_S = 60.0


class Call:
    """One POST request and the means to answer it."""

    def __init__(self, handler: http.server.BaseHTTPRequestHandler, body: Any) -> None:
        self._handler, self.body, self.path = handler, body, handler.path
        self.headers = dict(handler.headers.items())
        self._is_chunked = False

    def answer(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._head(status, kind, {"Content-Length": str(len(data)), **headers})
        self._handler.wfile.write(data)

    def stream(self, *, is_chunked: bool = True) -> None:
        self._is_chunked = is_chunked
        self._head(200, "text/event-stream; charset=utf-8", {"Transfer-Encoding": "chunked"} if is_chunked else {})

    def piece(self, data: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def event(self, **data: Any) -> None:
        self.piece(event(**data))

    def done(self) -> None:
        self.piece(b"data: [DONE]\n\n")
        if self._is_chunked:
            self._handler.wfile.write(b"0\r\n\r\n")

    def wait_for_disconnect(self) -> None:
        """Wait until the client has closed the connection."""
        while self._handler.connection.recv(1024):
            pass

    def _head(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self._handler.send_response(status)
        for name, value in {"Content-Type": kind, "Connection": "close", **headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chat_chunk(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """Return one chunk of a chat completion."""
    return {"choices": [{"index": index, "delta": {"content": text}, **more}]}


class FakeOpenAI:
    """OpenAI-compatible server: `script` answers POST requests, `models` is the answer of /v1/models."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "m", "owned_by": "vllm"}]}
        self.version: Any = None
        """What /version answers; None: nothing."""
        self.num_asked_models = 0
        self.script: Callable[[Call], None] = lambda call: call.answer(500, b"")
        self.calls: list[Call] = []
        self.num_hung_up = 0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.num_asked_models += self.path == "/v1/models"
                document = fake.version if self.path == "/version" else fake.models
                status = 200 if self.path == "/v1/models" or (self.path == "/version" and document is not None) else 404
                body = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                call = Call(self, body)
                fake.calls.append(call)
                self.close_connection = True
                try:
                    fake.script(call)
                except OSError:
                    fake.num_hung_up += 1

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Ignore errors, because clients may hang up."""

        self.http = Server(("127.0.0.1", 0), Handler)
        self.address = f"vllm://127.0.0.1:{self.http.server_address[1]}"
        self.url = self.address.replace("vllm", "http")
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    made = FakeOpenAI()
    yield made
    made.close()


@pytest.fixture
def prompt() -> Iterator[Callable[..., Prompter]]:
    """Function that opens a prompter: `prompt("vllm://…", …)`."""
    made: list[Prompter] = []

    def start(address: str, *, silence_s: float = 600.0, **options: str) -> Prompter:
        made.append(Prompter(ExternalAddress.parse(address, **options), silence_s=silence_s))
        return made[-1]

    yield start
    for each in made:
        each.close()


def wait_for(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def replies_until(prompter: Any, holds: Callable[[list[Reply]], Any]) -> list[Reply]:
    """Return all replies up to the moment when `holds` is true of them."""
    got: list[Reply] = []

    def look() -> Any:
        got.extend(prompter.poll_replies())
        return holds(got)

    wait_for(look)
    return got


def replies_until_end(prompter: Any, num_ends: int = 1) -> list[Reply]:
    """Return all replies up to and including `num_ends` final ones."""
    return replies_until(prompter, lambda got: sum(isinstance(r, Finished | Failed | Refused) for r in got) >= num_ends)

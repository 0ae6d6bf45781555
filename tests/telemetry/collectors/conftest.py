"""Fixtures for external sources: an HTTP server with configurable answers, and sources that are closed with their
test.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.external_source import ExternalSource
from kvscope_telemetry.collectors.http_client import HttpClient
from kvscope_telemetry.collectors.scrape import Scraper

WAIT_S = 60.0
"""Timeout of every wait. Passing tests never wait this long."""
TEXT = "text/plain; version=1.0.0; charset=utf-8"
Answer = tuple[int, str, bytes]


class FakeServer:
    """Server that answers by path, or 404 for paths without an answer, and records the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, str]] = []
        """Path and authorization."""
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers.get("Authorization", "")))
                status, kind, body = server.answers.get(self.path, (404, TEXT, b"no such path"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Ignore errors, because clients may hang up."""

        self.http = Server(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def set_answer(self, path: str, body: bytes, kind: str = TEXT, status: int = 200) -> None:
        self.answers[path] = (status, kind, body)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.close()


@pytest.fixture
def attach() -> Iterator[Callable[..., ExternalSource]]:
    """Function that opens a source that polls often: `attach("vllm://…", …)`."""
    made: list[ExternalSource] = []

    def start(text: str, *, sink: object = None, **options: str) -> ExternalSource:
        address = ExternalAddress.parse(text, **options)

        def scraper(of: ExternalAddress) -> Scraper:
            return Scraper(of, every_s=0.02, pauses_s=(0.02, 0.1), http=HttpClient(of, timeout_s=WAIT_S))

        made.append(ExternalSource(address, frame_s=0.01, scraper=scraper, sink=sink))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.close()


def wait_for_mirror(source: ExternalSource, condition: Callable[[], object]) -> None:
    """Update the mirror until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, source.status
        if source.update_mirror() is None:
            time.sleep(0.005)

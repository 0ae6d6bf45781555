"""A real HTTP server on this machine that receives the posts of a webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookReceiver:
    """HTTP server for webhook posts. `posts` are the received bodies, `answers` the statuses of the next responses
    (204 after them).
    """

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.answers: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.heads.append({**dict(self.headers), "path": self.path})
                receiver.posts.append(json.loads(body))
                receiver.may_answer.wait(60.0)
                status = receiver.answers.pop(0) if receiver.answers else 204
                self.send_response(status)
                if status in (301, 302, 307):
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?token=x"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def open_receiver() -> Iterator[WebhookReceiver]:
    """Yield a receiver and close it afterwards."""
    receiver = WebhookReceiver()
    try:
        yield receiver
    finally:
        receiver.close()

"""A small Hugging Face hub over HTTP: an open model, a gated one, an empty one, and one whose download never ends."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"\x80never fetched",
    "modeling_own.py": b"never fetched",
}
STOPPING = threading.Event()


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub that a model download uses."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].replace("/owner/endless", "/owner/model")
        if path.startswith("/api/models/owner/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/owner/model/resolve/{COMMIT}/"):
            self.answer(FILES[path.rsplit("/", 1)[1]])
        elif path.startswith("/api/models/owner/empty"):
            self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/owner/broken"):
            self.answer(b"{}", 500)
        elif path.startswith("/api/models/owner/closed"):
            self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        extra = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, **(headers or {})}
        for name, value in {"Content-Length": str(len(data)), **extra}.items():
            self.send_header(name, value)
        self.end_headers()
        is_endless = self.path.startswith("/owner/endless/resolve/")
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_endless else data)
            if is_endless:
                STOPPING.wait()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def small_hub(home: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that uses the hub and caches in `home`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    STOPPING.clear()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    try:
        yield proxies | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",
        }
    finally:
        STOPPING.set()
        server.shutdown()
        thread.join()
        server.server_close()

"""Hugging Face ids: from this machine, from a hub (a small one of our own, over HTTP), and without any."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvscope_engine.model.fetching.hub import hub_folder
from kvscope_telemetry.errors import KvscopeError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"\x80never fetched",
    "modeling_own.py": b"never fetched",
}
ASK = """
import json, sys
from kvscope_engine.model.fetching.hub import hub_folder
from kvscope_telemetry.errors import KvscopeError
heard = []
try:
    print(hub_folder(sys.argv[1], heard.append))
except KvscopeError as error:
    print(f"{type(error).__name__}: {error}")
print(json.dumps([[progress.done, progress.total] for progress in heard]))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of one model asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
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
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests are silent."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A hub, and the environment of a process that asks it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    yield (
        os.environ
        | proxies
        | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
        }
    )
    server.shutdown()
    thread.join()
    server.server_close()


def ask(repository: str, environment: dict[str, str]) -> tuple[str, list[list[int]], str]:
    """Answer or error of a process that wants `repository`, the progress it heard, and its standard error."""
    command = [sys.executable, "-c", ASK, repository]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer, progress = done.stdout.splitlines()
    return answer, json.loads(progress), done.stderr


def test_a_download(hub: dict[str, str]) -> None:
    answer, progress, written = ask("owner/model", hub)
    assert {path.name for path in Path(answer).iterdir()} == {"config.json", "model.safetensors"}
    assert (Path(answer) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1] >= 300_000
    assert written == ""
    again, _, _ = ask("owner/model", hub | {"HF_HUB_OFFLINE": "1"})
    assert again == answer


@pytest.mark.parametrize(
    ("repository", "error"),
    [
        ("owner/nothing", "BadInput: model 'owner/nothing'"),
        ("owner/closed", "BadInput: model 'owner/closed' is gated"),
    ],
)
def test_what_the_hub_does_not_give(hub: dict[str, str], repository: str, error: str) -> None:
    assert ask(repository, hub)[0].startswith(error)


def test_a_hub_that_cannot_be_reached(hub: dict[str, str]) -> None:
    answer, _, _ = ask("owner/model", hub | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert (
        answer == "KvscopeError: model 'owner/model' is not on this machine, and the Hugging Face hub cannot be reached"
    )


def test_offline_and_not_here() -> None:
    with pytest.raises(KvscopeError, match="'nobody/nothing' is not on this machine"):
        hub_folder("nobody/nothing", lambda _: None)

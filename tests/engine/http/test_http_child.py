"""The API as a child process of the engine: it serves, is restarted when it dies, and its address is checked first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from tests.engine.http.served import Served, wait_for

from kvscope_engine.cli.main import main
from kvscope_engine.http import http_child as child_module
from kvscope_engine.http.http_child import HttpChild, local_endpoint
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.transport.connections import NO_KEY


def children() -> list[int]:
    """Return the children of this thread, which is the one that starts them."""
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


def health(address: str) -> int:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            return int(answer.status)
    except OSError:
        return 0


def test_killed_child_is_reported_and_restarted_on_the_same_port(served: Served) -> None:
    received: list[str] = []
    before = set(children())
    child = HttpChild("127.0.0.1:0", api_key="", options=[], report=received.append)
    with child.running(f"ipc://{served.folder}", NO_KEY):
        wait_for(lambda: health(child.url) == 200, "an API that serves")
        request = urllib.request.Request(f"{child.url}/v1/completions", json.dumps({"prompt": "x"}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] == "length"
        (pid,) = set(children()) - before
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: received, "a word on its end")
        assert f"on {child.url} was killed by signal 9; restarting it" in received[0]
        wait_for(lambda: health(child.url) == 200, "an API that serves again")
        assert served.ask("/health")[0] == 200
    assert health(child.url) == 0


def test_child_that_does_not_stay_up_ends_the_engine_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(child_module.sys, "executable", "/bin/false")
    received: list[str] = []
    stopped = threading.Event()
    child = HttpChild("127.0.0.1:0", api_key="", options=[], report=received.append, stop_engine=stopped.set)
    with pytest.raises(KvscopeError, match=r"ended: 1; it was restarted 5 times"), child.running("ipc:///none", NO_KEY):
        assert stopped.wait(60)
    assert len(received) == child_module.MAX_RESTARTS


def test_child_that_refuses_its_options_is_not_restarted(tmp_path: Path) -> None:
    received: list[str] = []
    stopped = threading.Event()
    child = HttpChild(
        "127.0.0.1:0", api_key="", options=["--no-such-option"], report=received.append, stop_engine=stopped.set
    )
    with (
        pytest.raises(KvscopeError, match=r"ended: 2; it was restarted 0 times"),
        child.running(f"ipc://{tmp_path}", NO_KEY),
    ):
        assert stopped.wait(60)
    assert received == []


def test_api_process_ends_with_its_engine(served: Served) -> None:
    received: list[str] = []
    child = HttpChild("127.0.0.1:0", api_key="", options=["--served-model-name", "other"], report=received.append)
    with child.running(f"ipc://{served.folder}", NO_KEY):
        wait_for(lambda: health(child.url) == 200, "an API that serves")
    assert health(child.url) == 0
    assert not received


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--http", "nonsense"], "HOST:PORT"),
        (["--http", "127.0.0.1:99999"], "HOST:PORT"),
        (["--http", "0.0.0.0:0"], "API key"),
        (["--http", "127.0.0.1:0", "--api-key", ""], "printable"),
        (["--api-key", "x"], "--http"),
        (["--http", "127.0.0.1:0", "--endpoint", "tcp://127.0.0.1:0", "--keyless", "viewer"], "viewer"),
    ],
)
def test_invalid_http_options_are_refused_before_loading(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSCOPE_API_KEY", raising=False)
    assert main(["serve", *words]) == 2
    assert reason in capsys.readouterr().err


def test_http_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert main(["serve", "--http", f"127.0.0.1:{holder.getsockname()[1]}"]) == 1
    assert "Address already in use" in capsys.readouterr().err


def test_api_beyond_loopback_needs_an_api_key() -> None:
    with pytest.raises(BadInput, match="API key"):
        HttpChild("0.0.0.0:0", api_key="", options=[], report=print)
    HttpChild("0.0.0.0:0", api_key="secret", options=[], report=print).close()


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("tcp://0.0.0.0:7710", "tcp://127.0.0.1:7710"),
        ("tcp://*:7710", "tcp://127.0.0.1:7710"),
        ("tcp://[::]:7710", "tcp://[::1]:7710"),
        ("ipc:///tmp/x/telemetry", "ipc:///tmp/x/telemetry"),
    ],
)
def test_wildcard_endpoint_is_reached_by_loopback(bound: str, reached: str) -> None:
    assert local_endpoint(bound) == reached


def test_api_process_does_not_import_torch() -> None:
    program = (
        "import sys, kvscope_engine.http.http_server, kvscope_engine.tokenization.tokenizer_files;"
        " from transformers.utils.chat_template_utils import _compile_jinja_template;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

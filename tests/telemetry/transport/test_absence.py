"""Why nobody answers is told within three seconds, for each way in which nobody does; an engine that comes ends it."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_S = 60.0


def first_reason(source: LiveSource) -> str:
    """The first reason, however long that takes on a busy machine."""
    assert source.wait(lambda: bool(source.status.reason), WAIT_S)
    return source.status.reason


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def listener() -> Iterator[int]:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@contextmanager
def web_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_nothing_listens() -> None:
    port = free_port()
    with LiveSource(f"tcp://127.0.0.1:{port}") as source:
        assert first_reason(source) == f"nothing listens on 127.0.0.1:{port} (connection refused)"
        assert source.status.state is SourceState.CONNECTING


def test_the_name_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's resolver makes of it, and however long it takes."""

    def unknown(host: str, *more: object, **others: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with LiveSource("tcp://localhost:7710") as source:
        assert first_reason(source) == "unknown host 'localhost' (name or service not known)"


def test_there_is_no_socket_file(tmp_path: Path) -> None:
    with LiveSource(f"ipc://{tmp_path}/nowhere") as source:
        assert first_reason(source).startswith(f"no socket file {tmp_path}/nowhere/telemetry")


def test_the_socket_file_is_of_an_engine_that_ended(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "telemetry"))
    with LiveSource(f"ipc://{tmp_path}") as source:
        assert first_reason(source).startswith(f"nothing listens on {tmp_path}/telemetry")


def test_somebody_else_listens() -> None:
    with listener() as port, LiveSource(f"tcp://127.0.0.1:{port}") as source:
        assert first_reason(source).startswith(f"something listens at 127.0.0.1:{port}, but it is not a kvscope engine")
    with web_server() as port, LiveSource(f"tcp://127.0.0.1:{port}") as source:
        reason = first_reason(source)
        assert f"127.0.0.1:{port}" in reason


def test_an_engine_that_comes_is_followed_and_nothing_is_told_of_before(tmp_path: Path) -> None:
    with LiveSource(f"ipc://{tmp_path}/telemetry") as source:
        assert "no socket file" in first_reason(source)
        engine = SimulatedEngine(num_blocks=64, num_running=2)
        with closing(SimulatedServer(engine, f"ipc://{tmp_path}/telemetry", rate=30.0)):
            assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)
            assert source.status.reason == ""


def test_it_is_looked_into_at_once() -> None:
    """The pace is by the clock that the reading thread gives: the first look is after 0.3 s of it."""
    from kvscope_telemetry.transport.unreachable_engine import FIRST_S, UnreachableEngine

    absence = UnreachableEngine(f"tcp://127.0.0.1:{free_port()}")
    absence.poll(10.0, is_open=False, is_up=False)
    assert absence.why == ""
    absence.poll(10.0 + FIRST_S, is_open=False, is_up=False)
    deadline = time.monotonic() + WAIT_S
    while not absence.why and time.monotonic() < deadline:
        absence.poll(10.0 + FIRST_S, is_open=False, is_up=False)
    assert "connection refused" in absence.why
    absence.poll(11.0, is_open=True, is_up=True)
    assert absence.why == ""

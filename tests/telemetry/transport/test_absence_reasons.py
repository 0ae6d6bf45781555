"""The reason why no engine answers is shown within three seconds, for each case; an engine that appears clears it."""

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
    """Return the first reason, however long it takes on a busy machine."""
    assert source.wait(lambda: bool(source.status.reason), WAIT_S)
    return source.status.reason


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def silent_listener() -> Iterator[int]:
    """Port that accepts connections and never sends anything."""
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


def test_closed_port_is_reported() -> None:
    port = free_port()
    with LiveSource(f"tcp://127.0.0.1:{port}") as source:
        assert first_reason(source) == f"nothing listens on 127.0.0.1:{port} (connection refused)"
        assert source.status.state is SourceState.CONNECTING


def test_unknown_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent of the machine's resolver and its speed."""

    def unknown(host: str, *more: object, **others: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with LiveSource("tcp://localhost:7710") as source:
        assert first_reason(source) == "unknown host 'localhost' (name or service not known)"


def test_missing_socket_file_is_reported(tmp_path: Path) -> None:
    with LiveSource(f"ipc://{tmp_path}/nowhere") as source:
        assert first_reason(source).startswith(f"no socket file {tmp_path}/nowhere/telemetry")


def test_stale_socket_file_is_reported(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "telemetry"))
    with LiveSource(f"ipc://{tmp_path}") as source:
        assert first_reason(source).startswith(f"nothing listens on {tmp_path}/telemetry")


def test_listener_that_is_no_engine_is_reported() -> None:
    with silent_listener() as port, LiveSource(f"tcp://127.0.0.1:{port}") as source:
        assert first_reason(source).startswith(f"something listens at 127.0.0.1:{port}, but it is not a kvscope engine")
    with web_server() as port, LiveSource(f"tcp://127.0.0.1:{port}") as source:
        reason = first_reason(source)
        assert f"127.0.0.1:{port}" in reason


def test_engine_that_appears_is_followed_and_clears_the_reason(tmp_path: Path) -> None:
    with LiveSource(f"ipc://{tmp_path}/telemetry") as source:
        assert "no socket file" in first_reason(source)
        engine = SimulatedEngine(num_blocks=64, num_running=2)
        with closing(SimulatedServer(engine, f"ipc://{tmp_path}/telemetry", rate=30.0)):
            assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)
            assert source.status.reason == ""


def test_reason_for_a_missing_engine_is_first_checked_after_0_3_seconds() -> None:
    """The reader thread passes its clock: the first check is at 0.3 s of it."""
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

"""Times of two machines are never compared: the loopback end of a tunnel leads to another machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.host_id import host_id

WAIT_S = 60.0


def _watch_engine_on_host(endpoint: str, host: str, check: Callable[[LiveSource, SimulatedServer], None]) -> None:
    engine: Any = SimulatedEngine(num_blocks=100)
    engine.hello = msgspec.structs.replace(engine.hello, host=host)
    server = SimulatedServer(engine, endpoint, rate=200)
    try:
        with LiveSource(endpoint) as source:
            assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)
            assert source.wait(lambda: source.status.frames_received > 10, WAIT_S)
            check(source, server)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("kind", "host", "is_known"),
    [
        pytest.param(
            *("tcp", host_id(), True),
            marks=pytest.mark.skipif(not host_id(), reason="this system has no id of its boot"),
        ),
        ("tcp", "another machine", False),
        ("tcp", "", False),
        ("ipc", host_id(), True),
        ("ipc", "", True),
        ("ipc", "a container's forwarded socket", False),
    ],
)
def test_latency_is_known_only_on_the_same_machine(
    make_endpoint: Callable[[str], str], kind: str, host: str, is_known: bool
) -> None:
    def check(source: LiveSource, server: SimulatedServer) -> None:
        if is_known:
            assert source.wait(lambda: source.status.latency_ns >= 0, WAIT_S)
        else:
            assert source.status.latency_ns == -1

    _watch_engine_on_host(make_endpoint(kind), host, check)


def test_closed_tunnel_is_not_reported_as_a_dead_engine(make_endpoint: Callable[[str], str]) -> None:
    def check(source: LiveSource, server: SimulatedServer) -> None:
        server.close(goodbye=False)
        assert source.wait(lambda: source.status.state is SourceState.STALE, WAIT_S), source.status

    _watch_engine_on_host(make_endpoint("tcp"), "another machine", check)


def test_host_id_of_a_machine_is_the_same_at_every_call() -> None:
    assert host_id() == host_id()
    assert len(host_id()) in (0, 16)

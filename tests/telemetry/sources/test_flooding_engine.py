"""An engine that sends without end or sends no valid messages: the client's memory stays bounded, and it follows the
next engine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import resident_bytes
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.operating_system import fcntl
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.endpoints import endpoints

WAIT_S = 60.0
MIB = 1 << 20
MAX_GROWTH_BYTES = 2048 * MIB
"""Bound on a flood, plus what arrives before it is noticed (checked several times a second; a GiB arrives in one), plus
memory that earlier tests freed. Without a bound the client grows until the test times out."""
FLOOD = """
import sys, zmq
telemetry, command, kind, size = sys.argv[1:]
context = zmq.Context()
publisher = context.socket(zmq.XPUB)
publisher.sndhwm, publisher.xpub_nodrop = 4, 1
publisher.bind(telemetry)
router = context.socket(zmq.ROUTER)
router.router_mandatory, router.sndhwm = 1, 4
router.bind(command)
data = bytes(int(size))
assert publisher.recv() == b"\\1"
while kind == "telemetry":
    publisher.send(data, copy=False)
while True:
    client, _ = router.recv_multipart()
    try:
        while True:
            router.send_multipart([client, data], copy=False, flags=zmq.NOBLOCK)
    except zmq.ZMQError:
        pass
"""

PARTS = """
import socket, sys, time
telemetry, command, _, size = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(telemetry.removeprefix("ipc://"))
listener.listen()
socket.socket(socket.AF_UNIX).bind(command.removeprefix("ipc://"))
part = b"\\x03" + int(size).to_bytes(8, "big") + bytes(int(size))
while True:
    peer, _ = listener.accept()
    try:
        peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\0" + b"NULL".ljust(20, b"\\0") + bytes(32))
        peer.sendall(b"\\x04\\x19\\x05READY\\x0bSocket-Type\\0\\0\\0\\x03PUB")
        while True:
            peer.sendall(part)
            time.sleep(len(part) / (1 << 29))
    except OSError:
        peer.close()
"""
"""Sends a message that never ends, at most half a GiB per second: faster, the bytes that arrive between two checks of a
slow client would exceed its bound. ZeroMQ itself never sends such a message."""

MakeEndpoint = Callable[[str], str]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("telemetry", 16 * MIB),
        ("telemetry", MIB // 4),
        ("replies", 16 * MIB),
        pytest.param(
            *("parts", 16 * MIB),
            marks=pytest.mark.skipif(fcntl is None, reason="this system does not report unread bytes"),
        ),
    ],
)
def test_flood_is_bounded_in_bytes_and_the_next_engine_is_followed(
    kind: str,
    size: int,
    make_endpoint: MakeEndpoint,
    serve: Callable[..., SimulatedServer],
    watch: Callable[..., LiveSource],
    assert_mirrors: Callable[..., None],
) -> None:
    addresses = endpoints(endpoint := make_endpoint("ipc"))
    before, peak = resident_bytes(), 0
    flood = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARTS if kind == "parts" else FLOOD,
            addresses.telemetry,
            addresses.command,
            kind,
            str(size),
        ],
        stderr=subprocess.PIPE,
    )
    try:
        source = watch(endpoint)

        def is_noticed() -> bool:
            nonlocal peak
            peak = max(peak, resident_bytes() - before)
            return source.status.messages_rejected >= (1 if kind == "parts" else 20)

        assert source.wait(is_noticed, WAIT_S), source.status
        assert source.status.state is SourceState.CONNECTING
        assert source.wait(lambda: bool(source.status.reason), WAIT_S), "told a pass after it is counted"
    finally:
        flood.kill()
        flood.communicate()
        for address in addresses.telemetry, addresses.command:
            Path(address.removeprefix("ipc://")).unlink()
    assert peak < MAX_GROWTH_BYTES
    server = serve(endpoint)
    assert source.wait(lambda: source.update_mirror() is not None and source.status.state is SourceState.LIVE, WAIT_S)
    assert_mirrors(source, server)

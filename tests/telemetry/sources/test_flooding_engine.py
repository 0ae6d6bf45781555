"""An engine that sends without end, or nothing that is a message: the client stays small, and follows the next one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.connection_watch import _resident_bytes
from kvscope_telemetry.transport.endpoints import endpoints

WAIT_S = 60.0
MIB = 1 << 20
MAX_GROWTH_BYTES = 2048 * MIB
"""A flood, what came before it was noticed (looked at several times a second; a GiB comes in one), and what the
tests before left free. Without a bound it grows until the test gives up waiting."""
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
"""A message that is never finished, at most half a GiB of it a second: faster, what comes between two looks of a client
that has little of the processor says nothing of its bound. ZeroMQ itself sends no such thing."""

MakeEndpoint = Callable[[str], str]


@pytest.mark.parametrize(
    ("kind", "size"), [("telemetry", 16 * MIB), ("telemetry", MIB // 4), ("replies", 16 * MIB), ("parts", 16 * MIB)]
)
def test_a_flood_is_bounded_in_bytes(
    kind: str,
    size: int,
    make_endpoint: MakeEndpoint,
    serve: Callable[..., SimulatedServer],
    watch: Callable[..., LiveSource],
    assert_mirrors: Callable[..., None],
) -> None:
    addresses = endpoints(endpoint := make_endpoint("ipc"))
    before, peak = _resident_bytes(), 0
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
            peak = max(peak, _resident_bytes() - before)
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

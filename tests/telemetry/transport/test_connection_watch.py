"""Misbehaving connections to the engine's sockets, byte by byte: silent crowds, and endless messages and
subscriptions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from tests.processes import needs_unix, num_open_files
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.messages.commands import Command, Done, Failed, GetStatus
from kvscope_telemetry.messages.wire import decode_reply, encode
from kvscope_telemetry.transport import connection_watch as connections
from kvscope_telemetry.transport import server_sockets
from kvscope_telemetry.transport.server_sockets import ServerSockets

MIB = 1 << 20
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


class AnsweringEngine:
    """Server sockets that answer each command."""

    def __init__(self, endpoint: str) -> None:
        self.sockets = ServerSockets(endpoint, on_command=self._answer, heartbeat=lambda: None)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def ask(self) -> bool:
        """Return whether a new client gets an answer."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.rcvtimeo = dealer.sndtimeo = 60_000
        dealer.reconnect_ivl = 20
        dealer.connect(self.sockets.command_endpoint)
        try:
            dealer.send(encode(GetStatus(tag=7)))
            return decode_reply(dealer.recv()) == Done(tag=7)
        finally:
            dealer.close(linger=0)

    def close(self) -> None:
        self._context.term()
        self.sockets.close()

    def _answer(self, client: bytes, command: Command) -> None:
        self.sockets.reply(client, Done(tag=getattr(command, "tag", 0)))


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable heartbeats: a bare connection answers none and would be closed."""
    monkeypatch.setattr(server_sockets, "TCP_HEARTBEAT_MS", (600_000, 600_000))


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"ipc://{folder}" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def start_engine() -> Iterator[Callable[[str], AnsweringEngine]]:
    engines: list[AnsweringEngine] = []

    def make(endpoint: str) -> AnsweringEngine:
        engines.append(AnsweringEngine(endpoint))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def connect(endpoint: str) -> socket.socket:
    """Open a plain socket that sends nothing of ZeroMQ's protocol."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        bare = socket.socket(socket.AF_UNIX)
        bare.connect(rest)
    else:
        host, _, port = rest.rpartition(":")
        bare = socket.create_connection((host, int(port)))
    bare.settimeout(60)
    return bare


def greet(bare: socket.socket, kind: bytes) -> None:
    """Do the handshake without keys."""
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    bare.sendall(GREETING + bytes([4, len(ready)]) + ready)
    said = b""
    while b"READY" not in said:
        said += receive(bare)


def receive(bare: socket.socket) -> bytes:
    data = bare.recv(1 << 16)
    assert data, "the connection was cut"
    return data


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def was_cut(bare: socket.socket, data: bytes, most: int) -> bool:
    """Send `data` repeatedly, up to `most` bytes. Returns whether the connection was closed meanwhile."""
    try:
        for _ in range(most // max(1, len(data))):
            bare.sendall(data)
        wait_for(lambda: bare.recv(1 << 16) == b"")
    except (ConnectionError, BrokenPipeError):
        return True
    return True


def test_engine_on_a_system_without_proc_answers_its_clients(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str, **options: object) -> object:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(connections, "open", missing, raising=False)
    assert start_engine(endpoint).ask()


@pytest.mark.parametrize("name", ["command_endpoint", "telemetry_endpoint"])
def test_silent_connections_do_not_lock_out_clients(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(server_sockets, "MAX_CONNECTIONS", 8)
    for handshake in ("HANDSHAKE_MS", "TCP_HANDSHAKE_MS"):  # so that they are not closed for their silence
        monkeypatch.setattr(server_sockets, handshake, 600_000)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 600.0)
    engine = start_engine(endpoint)
    assert engine.ask()
    before = num_open_files()
    with contextlib.ExitStack() as crowd:
        for _ in range(100):
            crowd.enter_context(connect(getattr(engine.sockets, name)))
        assert engine.ask()
        wait_for(lambda: num_open_files() - before < 100 + 12)
    wait_for(lambda: num_open_files() <= before + 2)
    assert engine.ask()


@needs_unix
def test_endless_message_closes_its_connection(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sockets, "MAX_READ_BYTES", 2 * MIB)
    monkeypatch.setattr(connections, "MAX_GROWTH_BYTES", 32 * MIB)
    engine = start_engine(endpoint)
    with connect(engine.sockets.command_endpoint) as bare:
        greet(bare, b"DEALER")
        part = b"\x03" + MIB.to_bytes(8, "big") + b"x" * MIB
        assert was_cut(bare, part, 4096 * MIB)
    assert engine.ask()


def test_message_of_100000_parts_closes_its_connection(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str
) -> None:
    engine = start_engine(endpoint)
    with connect(engine.sockets.command_endpoint) as bare:
        greet(bare, b"DEALER")
        bare.sendall(b"\x01\x00" * 100_000 + b"\x00\x01e")
        assert engine.ask()
        assert was_cut(bare, b"", 0)


def test_message_of_ten_parts_is_answered_with_an_error(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str
) -> None:
    engine = start_engine(endpoint)
    with connect(engine.sockets.command_endpoint) as bare:
        greet(bare, b"DEALER")
        bare.sendall(b"\x01\x00" * 9 + b"\x00\x01e")
        said = b""
        while b"not 10" not in said:
            said += receive(bare)
    assert b"one message part" in said


@needs_unix
def test_endless_subscriptions_close_their_connection(start_engine: Callable[[str], AnsweringEngine]) -> None:
    engine = start_engine("tcp://127.0.0.1:0")
    with connect(engine.sockets.telemetry_endpoint) as bare:
        greet(bare, b"SUB")
        assert was_cut(bare, b"\x00\x65\x01" + os.urandom(100), 8 * MIB)
    assert engine.ask()


def test_slow_client_with_large_commands_is_not_disconnected(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sockets, "MAX_READ_BYTES", MIB)
    engine = start_engine(endpoint)
    with connect(engine.sockets.command_endpoint) as bare:
        greet(bare, b"DEALER")
        text = b"x" * (MIB - 100)
        for _ in range(30):  # far more than is accepted between two complete messages
            bare.sendall(b"\x02" + len(text).to_bytes(8, "big") + text)
        said = b""
        while said.count(b"cannot be read") < 30:
            said += receive(bare)


HOLDER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.transport.server_sockets import ServerSockets
try:
    ServerSockets(sys.argv[1], on_command=print, heartbeat=lambda: None).close()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
except KvscopeError as error:
    print(error)
"""


def start_with_file_limits(folder: Path, soft: int, hard: int) -> str:
    command = [sys.executable, "-c", HOLDER, f"ipc://{folder}", str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_open_file_limit_is_raised_or_the_start_refused(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 5_000:
        pytest.skip(f"this machine allows {hard} open files")
    assert start_with_file_limits(folder, 256, 5_000) == "5000 5000"
    assert "may open only 2000 files: at least 4096 are needed" in start_with_file_limits(folder, 256, 2_000)


def test_unread_large_replies_are_refused_and_bounded_in_total(
    start_engine: Callable[[str], AnsweringEngine], endpoint: str
) -> None:
    """A client that requests more than it reads gets an error, and other clients still get their answers."""
    from kvscope_telemetry.messages.commands import BlockContent, BlockText

    engine = start_engine(endpoint)
    clients: list[bytes] = []
    sockets = engine.sockets
    sockets._on_command = lambda client, command: clients.append(client)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = 60_000
    dealer.connect(sockets.command_endpoint)
    dealer.send(encode(GetStatus()))
    wait_for(lambda: bool(clients))
    text = "x" * (4 * MIB)
    for tag in range(50):
        sockets.reply(clients[0], BlockText(contents=(BlockContent(block=1, text=text),), tag=tag))
    replies = [decode_reply(dealer.recv()) for _ in range(50)]
    assert [reply.tag for reply in replies if isinstance(reply, BlockText | Failed)] == list(range(50))
    refused = [reply for reply in replies if isinstance(reply, Failed)]
    assert refused
    assert "read them before sending more" in refused[0].reason
    dealer.close(linger=0)
    context.term()


def test_long_subscription_closes_its_connection_before_it_is_stored(
    endpoint: str, start_engine: Callable[[str], AnsweringEngine]
) -> None:
    engine = start_engine(endpoint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.reconnect_ivl = -1
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    monitor.rcvtimeo = 60_000
    subscriber.subscribe(bytes(200))
    subscriber.connect(engine.sockets.telemetry_endpoint)
    try:
        events = [recv_monitor_message(monitor)["event"] for _ in range(2)]
        assert events == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]
        assert engine.ask(), "other clients must not notice"
    finally:
        subscriber.disable_monitor()
        monitor.close(linger=0)
        subscriber.close(linger=0)
        context.term()

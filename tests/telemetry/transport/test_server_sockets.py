"""The engine's real sockets: what is delivered, what is refused, and what misbehaving clients cost."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.processes import make_named_pipe, needs_unix, num_open_files, resident_bytes

from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.commands import (
    MAX_COMMAND_BYTES,
    Command,
    Done,
    Failed,
    GetStatus,
    Reply,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Heartbeat, TelemetryMessage
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode
from kvscope_telemetry.transport import server_sockets
from kvscope_telemetry.transport.server_sockets import ServerSockets

WAIT_MS = 60_000
MIB = 1 << 20


class Server:
    """Server sockets that answer each command with its tag, or as the test says."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.commands: list[tuple[bytes, Command]] = []
        self.lost: list[bytes] = []
        self.was_lost = threading.Event()
        self.sockets = ServerSockets(
            endpoint,
            on_command=self._take,
            heartbeat=lambda: Heartbeat(epoch=1, time_ns=time.monotonic_ns(), seq=99, step=3),
            on_client_lost=self._lose,
            **options,
        )

    def _take(self, client: bytes, command: Command) -> None:
        if isinstance(command, Submit):
            raise RuntimeError("a bug in the engine")
        self.commands.append((client, command))
        self.sockets.reply(client, Done(tag=getattr(command, "tag", 0)))

    def _lose(self, client: bytes) -> None:
        self.lost.append(client)
        self.was_lost.set()


class Peer:
    """A client with plain ZeroMQ sockets, without our library."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._sockets: list[zmq.Socket[bytes]] = []

    def subscriber(self, sockets: ServerSockets, **options: Any) -> zmq.Socket[bytes]:
        return self._socket(zmq.SUB, sockets.telemetry_endpoint, subscribe=b"", **options)

    def dealer(self, sockets: ServerSockets, **options: Any) -> zmq.Socket[bytes]:
        return self._socket(zmq.DEALER, sockets.command_endpoint, **options)

    def _socket(self, kind: int, endpoint: str, **options: Any) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.rcvtimeo = socket.sndtimeo = WAIT_MS
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, whatever the test's name."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(f"ipc://{folder}/telemetry")
    yield server
    server.sockets.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer(zmq.Context())
    yield peer
    peer.close()


def ask(dealer: zmq.Socket[bytes], data: bytes) -> Reply:
    dealer.send(data)
    return decode_reply(dealer.recv())


def frame(seq: int, num_bytes: int = 0) -> Frame:
    num_rows = -(-num_bytes // 30)
    blocks = Ledger(num_rows).pack(np.arange(num_rows, dtype=np.uint32))
    return Frame(epoch=1, seq=seq, step=seq, time_ns=0, blocks=blocks)


def wait_subscribed(subscriber: zmq.Socket[bytes]) -> None:
    """Wait until the subscription has arrived: the first heartbeat shows it."""
    decode_telemetry(subscriber.recv())


def receive_until(subscriber: zmq.Socket[bytes], wanted: Callable[[TelemetryMessage], bool]) -> list[TelemetryMessage]:
    messages: list[TelemetryMessage] = []
    while not messages or not wanted(messages[-1]):
        messages.append(decode_telemetry(subscriber.recv()))
    return messages


def is_frame(seq: int, message: TelemetryMessage) -> bool:
    return isinstance(message, Frame) and message.seq == seq


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


# Commands


def test_each_client_gets_its_own_answers(server: Server, peer: Peer) -> None:
    dealers = [peer.dealer(server.sockets) for _ in range(5)]
    for number, dealer in enumerate(dealers):
        dealer.send(encode(GetStatus(tag=number)))
    assert [decode_reply(dealer.recv()) for dealer in dealers] == [Done(tag=n) for n in range(5)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (b"\x91" * 200_000, "cannot be read"),
        (b"\x81\xa4type\xa9GetStatus" * 2, "cannot be read"),
        (b"\x82\xa4type\xa9GetStatus\xa3tag\xff", "cannot be read"),
        (b"\x82\xa4type\xa5Abort\xaarequest_id\xa2\xff\xfe", "UTF-8"),
        (b"\xdd\xff\xff\xff\xff", "cannot be read"),
        (b"\x82\xa4type\xa9GetStatus\xa3ext" + b"\x91" * 100_000, "nested too deep"),
        (b"x" * (MAX_COMMAND_BYTES + 1), "refused: at most"),
    ],
)
def test_unreadable_command_is_answered_with_the_reason(server: Server, peer: Peer, data: bytes, reason: str) -> None:
    dealer = peer.dealer(server.sockets)
    reply = ask(dealer, data)
    assert isinstance(reply, Failed)
    assert reason in reply.reason
    assert "\n" not in reply.reason
    assert ask(dealer, encode(GetStatus(tag=7))) == Done(tag=7)


def test_fuzzed_commands_are_answered_and_cost_no_memory(server: Server, peer: Peer) -> None:
    dealer = peer.dealer(server.sockets)
    randomness = random.Random(8)
    good = encode(GetStatus(tag=1 << 40))
    before = resident_bytes()
    for _ in range(2_000):
        data = bytearray(good if randomness.random() < 0.7 else randomness.randbytes(randomness.randrange(64)))
        for _ in range(randomness.randrange(4)):
            if data:
                data[randomness.randrange(len(data))] = randomness.randrange(256)
        assert isinstance(ask(dealer, bytes(data)), Done | Failed)
    assert resident_bytes() - before < 20 * MIB
    assert ask(dealer, encode(GetStatus(tag=7))) == Done(tag=7)


def test_multipart_command_is_refused(server: Server, peer: Peer) -> None:
    dealer = peer.dealer(server.sockets)
    dealer.send_multipart([b"", encode(GetStatus(tag=1))])
    reply = decode_reply(dealer.recv())
    assert isinstance(reply, Failed)
    assert "one message part, not 2" in reply.reason


def test_oversized_command_closes_only_its_connection(server: Server, peer: Peer) -> None:
    good, bad = peer.dealer(server.sockets), peer.dealer(server.sockets)
    assert ask(bad, encode(GetStatus(tag=1))) == Done(tag=1)
    bad.send(b"x" * (2 * MAX_COMMAND_BYTES + 1))
    assert ask(good, encode(GetStatus(tag=2))) == Done(tag=2)
    assert ask(bad, encode(GetStatus(tag=3))) == Done(tag=3), "the client must reconnect by itself"


def test_exception_in_a_command_handler_fails_only_that_command(server: Server, peer: Peer) -> None:
    dealer = peer.dealer(server.sockets)
    reply = ask(dealer, encode(Submit(request_id="a", prompt="b")))
    assert isinstance(reply, Failed)
    assert "a bug in the engine" in reply.reason
    assert ask(dealer, encode(GetStatus(tag=7))) == Done(tag=7)


# Telemetry


def test_frames_arrive_in_order_and_heartbeats_have_the_last_number(server: Server, peer: Peer) -> None:
    subscriber = peer.subscriber(server.sockets)
    wait_subscribed(subscriber)
    for seq in range(1, 201):
        server.sockets.publish(frame(seq, 64))
    messages = receive_until(subscriber, lambda m: isinstance(m, Heartbeat) and m.seq == 200)
    assert [m.seq for m in messages if isinstance(m, Frame)] == list(range(1, 201))
    assert server.sockets.messages_dropped == 0


def test_heartbeats_continue_while_the_engine_is_stuck(server: Server, peer: Peer) -> None:
    subscriber = peer.subscriber(server.sockets)  # the thread that made the sockets only waits
    beats = [decode_telemetry(subscriber.recv()) for _ in range(4)]
    times = [beat.time_ns for beat in beats if isinstance(beat, Heartbeat)]
    assert len(times) == 4
    assert all(earlier < later for earlier, later in itertools.pairwise(times))


def test_publish_takes_under_a_millisecond_of_the_engine_thread(server: Server, peer: Peer) -> None:
    subscriber = peer.subscriber(server.sockets)
    wait_subscribed(subscriber)
    costs = []
    message = frame(1, 4096)
    for _ in range(500):
        started = time.thread_time_ns()
        server.sockets.publish(message)
        costs.append(time.thread_time_ns() - started)
        subscriber.poll(1)
    costs.sort()
    assert costs[250] < 1_000_000, "the median in nanoseconds of this thread's own time"


@pytest.mark.parametrize(("num_bytes", "count"), [(4096, 60_000), (MIB, 400)])
def test_stalled_subscriber_costs_bounded_memory(server: Server, peer: Peer, num_bytes: int, count: int) -> None:
    stalled = peer.subscriber(server.sockets, rcvhwm=1, rcvbuf=4096)
    wait_subscribed(stalled)
    message = frame(1, num_bytes)
    before = resident_bytes()
    for number in range(count):
        server.sockets.publish(message)
        if number % (MIB // num_bytes) == 0:
            time.sleep(0.0005)  # like an engine, whose step lets the I/O thread run
    grown = resident_bytes() - before
    assert grown < 80 * MIB, f"{grown / MIB:.0f} MiB, where {num_bytes * count / MIB:.0f} were published"
    stalled.close(linger=0)
    server.sockets.publish(frame(count + 1, 100))


def test_stalled_subscriber_does_not_affect_others(server: Server, peer: Peer) -> None:
    stalled = peer.subscriber(server.sockets, rcvhwm=1, rcvbuf=4096)
    reader = peer.subscriber(server.sockets)
    for subscriber in (stalled, reader):
        wait_subscribed(subscriber)
    received: list[int] = []
    for seq in range(1, 3_001):
        server.sockets.publish(frame(seq, 2048))
        if seq % 100 == 0:
            frames = receive_until(reader, partial(is_frame, seq))
            received += [m.seq for m in frames if isinstance(m, Frame)]
    assert received == list(range(1, 3_001))


def test_message_that_cannot_be_encoded_is_counted_and_skipped(server: Server, peer: Peer) -> None:
    subscriber = peer.subscriber(server.sockets)
    wait_subscribed(subscriber)
    server.sockets.publish(Goodbye(epoch=1, reason="\ud800"))
    server.sockets.publish(Goodbye(epoch=1, reason="fine"))
    messages = receive_until(subscriber, lambda m: isinstance(m, Goodbye))
    assert isinstance(messages[-1], Goodbye)
    assert messages[-1].reason == "fine"
    assert server.sockets.messages_dropped == 1


def test_close_sends_queued_messages(server: Server, peer: Peer) -> None:
    subscriber, dealer = peer.subscriber(server.sockets), peer.dealer(server.sockets)
    wait_subscribed(subscriber)
    ask(dealer, encode(GetStatus(tag=1)))
    client = server.commands[0][0]
    for tag in range(100):
        server.sockets.reply(client, Done(tag=tag))
    server.sockets.publish(Goodbye(epoch=1, reason="the end"))
    started = time.monotonic()
    server.sockets.close()
    assert time.monotonic() - started < 20.0, "a client that does not read is waited for"
    assert receive_until(subscriber, lambda m: isinstance(m, Goodbye))
    assert [decode_reply(dealer.recv()) for _ in range(100)] == [Done(tag=tag) for tag in range(100)]


def test_opening_and_closing_leaks_no_files(folder: Path) -> None:
    def cycle() -> int:
        ServerSockets(f"ipc://{folder}/telemetry", on_command=print, heartbeat=lambda: None).close()
        return num_open_files()

    cycle()
    before = cycle()
    for _ in range(10):
        wait_for(lambda: cycle() <= before)


# Clients that disconnect or do not read


def test_hanging_context_does_not_block_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is free again as well."""
    may_end = threading.Event()
    end = zmq.Context.term
    monkeypatch.setattr(server_sockets, "END_S", 0.05)
    endpoint = f"ipc://{folder}/telemetry"
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "term", lambda context: may_end.wait(60.0) and end(context))
        ServerSockets(endpoint, on_command=print, heartbeat=lambda: None).close()
    ServerSockets(endpoint, on_command=print, heartbeat=lambda: None).close()
    may_end.set()


def test_disconnected_client_is_noticed_with_the_next_reply(server: Server, peer: Peer) -> None:
    dealer = peer.dealer(server.sockets)
    ask(dealer, encode(GetStatus(tag=1)))
    client = server.commands[0][0]
    dealer.close(linger=0)

    def is_answered() -> bool:
        server.sockets.reply(client, Done(tag=2))
        return server.was_lost.wait(0.01)

    wait_for(is_answered)
    assert set(server.lost) == {client}


def test_client_that_does_not_read_loses_only_its_own_replies(
    server: Server, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, reader = peer.dealer(server.sockets, rcvhwm=1, rcvbuf=4096), peer.dealer(server.sockets)
    ask(stalled, encode(GetStatus(tag=1)))
    client = server.commands[0][0]
    before = resident_bytes()
    text = "x" * 40_000
    for tag in range(4_000):  # 160 MB
        server.sockets.reply(client, Tokens(request_id="r", token_ids=(tag,), text=text))
        if tag % 500 == 0:
            assert ask(reader, encode(GetStatus(tag=tag))) == Done(tag=tag)
    wait_for(lambda: bool(server.lost))
    assert ask(reader, encode(GetStatus(tag=9))) == Done(tag=9)
    assert resident_bytes() - before < 200 * MIB
    assert set(server.lost) == {client}
    server.sockets.reply(client, Done(tag=77))
    while decode_reply(stalled.recv()) != Done(tag=77):
        pass  # it reads again and finds the last reply


def test_large_replies_to_one_client_keep_their_order(server: Server, peer: Peer) -> None:
    dealer = peer.dealer(server.sockets)
    ask(dealer, encode(GetStatus(tag=1)))
    client = server.commands[0][0]
    for number in range(6):
        text = "x" * (server_sockets.BIG_BYTES * 4 * (number % 2))
        server.sockets.reply(client, Tokens(request_id="r", token_ids=(number,), text=text))
    replies = [decode_reply(dealer.recv()) for _ in range(6)]
    assert [reply.token_ids for reply in replies if isinstance(reply, Tokens)] == [(n,) for n in range(6)]


# The endpoint


def test_second_engine_on_the_endpoint_is_refused_and_the_first_unharmed(
    server: Server, peer: Peer, folder: Path
) -> None:
    dealer = peer.dealer(server.sockets)
    with pytest.raises(EndpointInUse, match=rf"{folder}.*pid {os.getpid()}"):
        Server(f"ipc://{folder}")
    assert ask(dealer, encode(GetStatus(tag=5))) == Done(tag=5)


HOLDER = """
import sys, time
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.server_sockets import ServerSockets
sockets = ServerSockets(sys.argv[1], on_command=print, heartbeat=lambda: None)
print("up", flush=True)
time.sleep(600)
"""


@needs_unix
def test_killed_engine_does_not_block_its_endpoint(folder: Path, peer: Peer) -> None:
    endpoint = f"ipc://{folder}/telemetry"
    with subprocess.Popen([sys.executable, "-c", HOLDER, endpoint], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        with pytest.raises(EndpointInUse, match=f"pid {holder.pid}"):
            Server(endpoint)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (folder / "command").exists(), "the stale socket is still there"
    server = Server(endpoint)
    try:
        assert ask(peer.dealer(server.sockets), encode(GetStatus(tag=5))) == Done(tag=5)
    finally:
        server.sockets.close()


@needs_unix
def test_socket_directory_and_files_are_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        server = Server(f"ipc://{folder}/new/telemetry")
    finally:
        assert os.umask(before) == 0, "the umask of the process must not change"
    try:
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder / "new").iterdir()}
        assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700
        assert modes == {"telemetry": 0o700, "command": 0o700, "lock": 0o600}
    finally:
        server.sockets.close()


def test_directory_writable_by_others_is_refused(folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(BadInput, match="others can write"):
        Server(f"ipc://{folder}")


def test_deleted_lock_file_does_not_admit_a_second_engine(server: Server, peer: Peer, folder: Path) -> None:
    (folder / "lock").unlink()
    with pytest.raises(EndpointInUse, match="in use by another engine"):
        Server(f"ipc://{folder}")
    assert ask(peer.dealer(server.sockets), encode(GetStatus(tag=5))) == Done(tag=5)


@needs_unix
@pytest.mark.parametrize(
    "make",
    [make_named_pipe, os.mkdir, lambda path: os.symlink("elsewhere", path)],
)
def test_lock_that_is_no_regular_file_is_refused_in_one_line(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "lock")
    before = num_open_files()
    with pytest.raises(BadInput, match=r"not accepted: .*lock"):
        Server(f"ipc://{folder}")
    assert num_open_files() <= before


def test_directory_in_a_parent_writable_by_others_is_refused(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with pytest.raises(BadInput, match="others can replace"):
        Server(f"ipc://{folder}/open/kv")
    with pytest.raises(BadInput, match="others can replace"):
        Server(f"ipc://{folder}/open/deeper/kv")
    (folder / "open").chmod(0o1777)
    Server(f"ipc://{folder}/open/kv").sockets.close()


@needs_unix
@pytest.mark.parametrize("path", ["/", "/etc", "/usr"])
def test_system_directory_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: Path(path).stat().st_uid)
    with pytest.raises(BadInput, match=r"the system's|of its own"):
        Server(f"ipc://{path}")
    assert not (Path(path) / "lock").exists()


@needs_unix
def test_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadInput, match="another user"):
        Server(f"ipc://{folder}")


def test_file_in_place_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(BadInput, match="not a directory"):
        Server(f"ipc://{folder}/file")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://192.0.2.1:0"])
def test_tcp_beyond_loopback_needs_keys(endpoint: str) -> None:
    with pytest.raises(BadInput, match="not accepted without keys"):
        Server(endpoint)


def test_tcp_uses_two_consecutive_ports(peer: Peer) -> None:
    server = Server("tcp://127.0.0.1:0", keyless=Role.OPERATOR)
    try:
        telemetry, command = (
            int(endpoint.rpartition(":")[2])
            for endpoint in (server.sockets.telemetry_endpoint, server.sockets.command_endpoint)
        )
        assert command == telemetry + 1
        assert ask(peer.dealer(server.sockets), encode(GetStatus(tag=5))) == Done(tag=5)
        with pytest.raises(EndpointInUse, match=f"{telemetry} is taken"):
            Server(f"tcp://127.0.0.1:{telemetry}")
        with pytest.raises(EndpointInUse, match=f"{command} is taken"):
            Server(f"tcp://127.0.0.1:{command}")
    finally:
        server.sockets.close()


def test_socket_files_are_removed_at_the_end_and_after_a_failed_start(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvscope-"))
    try:
        server = Server(f"ipc://{folder}")
        assert {path.name for path in folder.iterdir()} >= {"telemetry", "command"}
        with pytest.raises(EndpointInUse):
            Server(f"ipc://{folder}")
        assert (folder / "command").is_socket(), "they are another's"
        server.sockets.close()
        assert [path.name for path in folder.iterdir() if path.is_socket()] == []
        (folder / "command").mkdir()  # the second socket cannot be bound
        with pytest.raises((BadInput, EndpointInUse)):
            Server(f"ipc://{folder}")
        assert [path.name for path in folder.iterdir() if path.is_socket()] == []
    finally:
        shutil.rmtree(folder)

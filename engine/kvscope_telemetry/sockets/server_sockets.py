"""The engine's two sockets and the thread that owns them; the one server-side file that touches ZeroMQ.

Owns binding, the I/O thread, encoding and decoding, heartbeats, and what is lost when somebody does not read.
Must not know what a command does: it hands each to `on_command` and sends what `reply` is given.

A client is lost when a reply to it fails: ZeroMQ's ROUTER tells of a closed connection on the next send
(disconnect notices are a draft feature that released pyzmq lacks). A client that has requests is sent tokens
all the time, so its death shows within a step of its first token; tcp connections also carry ZMTP heartbeats.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
import zmq
import zmq.auth

from kvscope_telemetry.errors import BadInput, EndpointInUse, KvscopeError, ProtocolError
from kvscope_telemetry.messages.commands import MAX_COMMAND_BYTES, BlockText, Command, Failed, Reply
from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unreadable import answer_unreadable
from kvscope_telemetry.messages.wire import decode_command, encode
from kvscope_telemetry.sockets.bind_address import IpcAddress, TcpAddress, parse_bind_address
from kvscope_telemetry.sockets.connection_watch import Connections
from kvscope_telemetry.sockets.endpoint_lock import EndpointLock, private_umask
from kvscope_telemetry.sockets.file_limit import raise_file_limit
from kvscope_telemetry.sockets.outbox import Outbox
from kvscope_telemetry.sockets.reply_backlogs import MAX_ANSWER_BYTES, Delivery, ReplyBacklogs
from kvscope_telemetry.sockets.wakeup import Wakeup

HEARTBEAT_S: Final = 0.5
CLOSE_S: Final = 0.5
"""How long `close` waits for what is queued to reach the kernel."""
BIG_BYTES: Final = 64 << 10
"""Messages from this size are handed to ZeroMQ without a copy and are counted while it holds them."""
MAX_BIG_BYTES_IN_FLIGHT: Final = 32 << 20
PUBLISH_HIGH_WATER: Final = 500
"""Messages a subscriber that does not read may have waiting: with the two above, 64 MiB at most."""
MAX_OUTBOX_MESSAGES: Final = 4096
MAX_OUTBOX_BYTES: Final = 32 << 20
RETRY_S: Final = (0.002, 0.05)
"""How soon a full client is offered its replies again: at first, and at last."""
MAX_COMMANDS_A_TURN: Final = 64
MAX_PARTS: Final = 16
"""Of a message that is answered with a refusal; beyond it the connection is cut."""
PARTS_S: Final = 0.005
"""Time a turn for the rest of such a message: it must be read to get at the messages after it."""
MAX_CONNECTIONS: Final = 256
"""On each of the two sockets."""
MAX_READ_BYTES: Final = MAX_COMMAND_BYTES + (1 << 20)
"""Up to this a command is read, and refused with the reason; above, its connection is cut."""
MAX_UNREAD_COMMANDS: Final = 4
"""Of one client, in ZeroMQ's hands."""
MAX_UNSENT_REPLIES: Final = 256
"""Of one client, in ZeroMQ's hands."""
BIG_REPLY_BYTES: Final = 16 << 10
"""Replies from this size go one at a time a client, so that 4 MiB are in ZeroMQ's hands at most."""
MAX_REPLY_BYTES_IN_FLIGHT: Final = 128 << 20
"""Of big replies to all clients: beyond it the one who has been given most is disconnected."""
HANDSHAKE_MS: Final = 2_000
TCP_HANDSHAKE_MS: Final = 5_000
WATCH_S: Final = 0.1
MONITOR_HIGH_WATER: Final = 100
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
MAX_PORT_ATTEMPTS: Final = 50

_EVENT: Final = struct.Struct("=HI")
"""Of a monitor: what happened, and to which descriptor."""


class ServerSockets:
    """PUB for telemetry and ROUTER for commands on `endpoint`, up from construction to `close`.

    `on_command(client, command)`, `heartbeat()` and `on_client_lost(client)` are called on the I/O thread and
    must be quick. The heartbeat's `seq` is filled in here: it is that of the last frame handed to the socket.
    `curve_key` is a CURVE secret certificate (`zmq.auth.create_certificates`); whoever holds its public key
    can connect, nobody else. It is needed on tcp outside loopback.

    Raises BadInput for an endpoint that is not accepted, EndpointInUse when it is taken.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_command: Callable[[bytes, Command], None],
        heartbeat: Callable[[], Heartbeat | None],
        curve_key: Path | None = None,
        on_client_lost: Callable[[bytes], None] | None = None,
    ) -> None:
        self._on_command = on_command
        self._heartbeat = heartbeat
        self._lock: EndpointLock | None = None
        raise_file_limit()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._subscribers = Connections(MAX_CONNECTIONS, _subscription_bytes)
        self._clients = Connections(MAX_CONNECTIONS, lambda seconds: (MAX_UNREAD_COMMANDS + 2) * MAX_READ_BYTES)
        self._monitors: dict[zmq.Socket[bytes], Connections] = {}
        try:
            self._configure(curve_key)
            self.telemetry_endpoint, self.command_endpoint = self._bind(endpoint, curve_key is not None)
            self._subscribers.listen(self.telemetry_endpoint)
            self._clients.listen(self.command_endpoint)
        except BaseException:
            self._release(linger_ms=0)
            raise
        self._outbox: Outbox = Outbox(MAX_OUTBOX_MESSAGES, MAX_OUTBOX_BYTES)
        self._replies: SimpleQueue[tuple[bytes, Reply]] = SimpleQueue()
        self._backlogs = ReplyBacklogs(self._send_reply, on_client_lost or (lambda client: None))
        self._big_replies: dict[bytes, tuple[zmq.MessageTracker, int]] = {}
        self._spoke_last: dict[int, bytes] = {}
        """By descriptor: the client whose connection that is, or was."""
        self._is_skipping = False
        self._next_watch = 0.0
        self._big_messages: list[tuple[zmq.MessageTracker, int]] = []
        self._num_unsent = 0
        self._last_seq = 0
        self._retry_s = RETRY_S[0]
        self._closing = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kvscope-server-io", daemon=True)
        self._thread.start()

    @property
    def frames_dropped(self) -> int:
        """Messages thrown away here because the publisher was behind; ones lost further on show as holes."""
        return self._outbox.num_dropped + self._num_unsent

    def publish(self, message: TelemetryMessage) -> None:
        """Send to whoever subscribes. From any thread; never waits."""
        self._outbox.put(message)
        self._wakeup.signal()

    def reply(self, client: bytes, message: Reply) -> None:
        """Send to one client. From any thread; never waits."""
        self._replies.put((client, message))
        self._wakeup.signal()

    def close(self) -> None:
        """Send what is queued, for half a second at most; end the thread; free the endpoint. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wakeup.signal()
        self._thread.join()
        self._release(linger_ms=int(CLOSE_S * 1000))
        self._wakeup.close()

    # Setting up, on the thread of the constructor.

    def _configure(self, curve_key: Path | None) -> None:
        self._publisher.sndhwm = PUBLISH_HIGH_WATER
        self._publisher.maxmsgsize = 1024  # subscriptions and handshakes, nothing more
        self._router.router_mandatory = 1
        self._router.rcvhwm = MAX_UNREAD_COMMANDS
        self._router.sndhwm = MAX_UNSENT_REPLIES
        self._router.maxmsgsize = MAX_READ_BYTES
        for socket in (self._publisher, self._router):
            socket.handshake_ivl = HANDSHAKE_MS
        self._monitor(self._publisher, "telemetry", self._subscribers)
        self._monitor(self._router, "command", self._clients)
        if curve_key is not None:
            public, secret = _load_curve_key(curve_key)
            for socket in (self._publisher, self._router):
                socket.curve_server, socket.curve_publickey, socket.curve_secretkey = 1, public, secret

    def _monitor(self, socket: zmq.Socket[bytes], name: str, connections: Connections) -> None:
        """Be told who connects. ZeroMQ accepts no more while it could not yet tell of about a thousand."""
        address = f"inproc://monitor-{name}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = MONITOR_HIGH_WATER
        monitor.connect(address)
        self._monitors[monitor] = connections

    def _bind(self, endpoint: str, has_key: bool) -> tuple[str, str]:
        address = parse_bind_address(endpoint)
        if isinstance(address, TcpAddress):
            if not (address.is_loopback or has_key):
                raise BadInput(
                    f"endpoint {endpoint} is not accepted: outside loopback it needs a CURVE key;"
                    " use tcp://127.0.0.1:PORT, or give a key file"
                )
            return self._bind_tcp(endpoint, address)
        return self._bind_ipc(endpoint, address)

    def _bind_ipc(self, endpoint: str, address: IpcAddress) -> tuple[str, str]:
        self._lock = EndpointLock(address.folder, endpoint)
        with private_umask():
            _bind(self._publisher, address.telemetry, endpoint)
            _bind(self._router, address.command, endpoint)
        return address.telemetry, address.command

    def _bind_tcp(self, endpoint: str, address: TcpAddress) -> tuple[str, str]:
        for socket in (self._publisher, self._router):
            socket.ipv6 = ":" in address.host
            socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
            socket.handshake_ivl = TCP_HANDSHAKE_MS
        attempts = 1 if address.port else MAX_PORT_ATTEMPTS
        for attempt in range(attempts):
            _bind(self._publisher, f"tcp://{address.host}:{address.port or '*'}", endpoint)
            telemetry = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
            host, _, port = telemetry.rpartition(":")
            command = f"{host}:{int(port) + 1}"
            try:
                _bind(self._router, command, endpoint)
                return telemetry, command
            except KvscopeError:
                if attempt + 1 == attempts:
                    raise
                self._publisher.unbind(telemetry)
        raise AssertionError("the loop above returns or raises")

    def _release(self, linger_ms: int) -> None:
        self._publisher.close(linger=linger_ms)
        self._router.close(linger=linger_ms)
        for monitor in self._monitors:
            monitor.close(linger=0)
        self._context.term()
        if self._lock is not None:
            self._lock.release()  # last: the next engine may bind from here on

    # Everything below runs on the I/O thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._closing:
            wait_s = max(0.0, min(next_beat, self._next_watch) - time.monotonic())
            if not self._backlogs.is_empty:
                wait_s = min(wait_s, self._retry_s)
            ready = {source for source, _ in poller.poll(math.ceil(1000 * wait_s))}
            if self._wakeup.reader in ready:
                self._wakeup.clear()
            for monitor in self._monitors:
                if monitor in ready:
                    self._read_connections(monitor)
            if self._router in ready:
                self._read_commands()
            self._watch()
            self._send_queued()
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + HEARTBEAT_S
        self._finish()

    def _finish(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        self._send_queued()
        while not self._backlogs.is_empty and time.monotonic() < deadline:
            time.sleep(RETRY_S[0])
            self._backlogs.retry()

    def _read_connections(self, monitor: zmq.Socket[bytes]) -> None:
        connections = self._monitors[monitor]
        try:
            while True:
                event, _ = monitor.recv_multipart(zmq.NOBLOCK)
                kind, descriptor = _EVENT.unpack(event)
                if kind == zmq.EVENT_ACCEPTED:
                    connections.accepted(descriptor)
                else:
                    connections.closed(descriptor)
        except zmq.Again:
            pass

    def _watch(self) -> None:
        """Cut those who send without end; sleeps while nobody is there to watch."""
        now_s = time.monotonic()
        if now_s < self._next_watch:
            return
        self._publisher.getsockopt(zmq.EVENTS)  # has ZeroMQ take in what came: who is ended in between ends
        for connections in self._monitors.values():
            connections.watch()
        is_alone = not any(len(connections) for connections in self._monitors.values())
        self._next_watch = now_s + (HEARTBEAT_S if is_alone else WATCH_S)

    def _read_commands(self) -> None:
        for _ in range(MAX_COMMANDS_A_TURN):
            try:
                if self._is_skipping and not self._skip_parts():
                    break
                client = self._router.recv(zmq.NOBLOCK)
                command = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            descriptor = int(command.get(zmq.SRCFD))
            self._spoke_last[descriptor] = client
            self._clients.heard(descriptor)
            if command.more:
                self._refuse_parts(client, descriptor)
            else:
                self._take_command(client, command.bytes)
        self._wakeup.signal()

    def _refuse_parts(self, client: bytes, descriptor: int) -> None:
        for num_parts in range(2, MAX_PARTS + 1):
            if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                self._answer(client, Failed(reason=f"a command is one message part, not {num_parts}"))
                return
        self._is_skipping = True
        self._clients.cut(descriptor)

    def _skip_parts(self) -> bool:
        """Read on to the end of a message of too many parts, for a moment; whether it is reached."""
        deadline = time.monotonic() + PARTS_S
        while time.monotonic() < deadline:
            for _ in range(1_000):
                if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                    self._is_skipping = False
                    return True
        return False

    def _take_command(self, client: bytes, data: bytes) -> None:
        try:
            self._on_command(client, decode_command(data))
        except ProtocolError as error:
            self._answer(client, answer_unreadable(data, str(error)))
        except Exception as error:  # a client's message must not end the thread that serves all of them
            self._answer(client, Failed(reason=f"the engine failed on this command: {error!r:.200}"))

    def _send_queued(self) -> None:
        for message in self._outbox.take():
            self._send_telemetry(message)
        if not self._backlogs.is_empty:
            self._retry_s = RETRY_S[0] if self._backlogs.retry() else min(2 * self._retry_s, RETRY_S[1])
        while True:
            try:
                client, reply = self._replies.get_nowait()
            except Empty:
                return
            self._answer(client, reply)

    def _beat(self) -> None:
        try:
            message = self._heartbeat()
        except Exception:  # a beat that fails is a beat that is missed, which is what it means
            return
        if message is not None:
            self._send_queued()
            self._send_telemetry(msgspec.structs.replace(message, seq=self._last_seq))

    def _send_telemetry(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self._last_seq = message.seq
        try:
            data = encode(message)
        except (ValueError, TypeError, OverflowError):
            self._num_unsent += 1
            return
        if len(data) < BIG_BYTES:
            self._publisher.send(data, zmq.NOBLOCK)
        elif self._has_room(len(data)):
            self._big_messages.append((_send_big(self._publisher, data), len(data)))
        else:
            self._num_unsent += 1

    def _has_room(self, num_bytes: int) -> bool:
        self._big_messages = [(tracker, size) for tracker, size in self._big_messages if not tracker.done]
        in_flight = sum(size for _, size in self._big_messages)
        return not in_flight or in_flight + num_bytes <= MAX_BIG_BYTES_IN_FLIGHT

    def _answer(self, client: bytes, reply: Reply) -> None:
        is_answer = isinstance(reply, Snapshot | BlockText)
        if is_answer and not self._backlogs.has_room(client):
            self._backlogs.add(client, encode(_read_first(reply)))
            return
        try:
            data = encode(reply)
        except (ValueError, TypeError, OverflowError) as error:
            data = encode(Failed(reason=f"the answer could not be written: {error!r:.200}"))
        if is_answer and not self._backlogs.has_room(client, len(data)):
            data = encode(_read_first(reply))
        self._backlogs.add(client, data)

    def _send_reply(self, client: bytes, data: bytes) -> Delivery:
        if len(data) >= BIG_REPLY_BYTES and not self._big_reply_done(client):
            return Delivery.FULL
        try:
            self._router.send(client, zmq.SNDMORE | zmq.NOBLOCK)
            if len(data) < BIG_REPLY_BYTES:
                self._router.send(data, zmq.NOBLOCK)
            else:
                self._big_replies[client] = (_send_big(self._router, data), len(data))
                self._bound_big_replies()
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError:
            self._big_replies.pop(client, None)
            return Delivery.GONE
        return Delivery.SENT

    def _big_reply_done(self, client: bytes) -> bool:
        """One big reply a client at a time: it has left for the kernel before the next one follows."""
        self._big_replies = {other: big for other, big in self._big_replies.items() if not big[0].done}
        return client not in self._big_replies

    def _bound_big_replies(self) -> None:
        sizes = {client: size for client, (tracker, size) in self._big_replies.items() if not tracker.done}
        if len(sizes) > 1 and sum(sizes.values()) > MAX_REPLY_BYTES_IN_FLIGHT:
            largest = max(sizes, key=lambda client: sizes[client])
            self._clients.cut(next((d for d, client in self._spoke_last.items() if client == largest), -1))
            del self._big_replies[largest]


def _subscription_bytes(seconds: float) -> int:
    """What a subscriber may have sent after so long: it subscribes once, and says now and then that it lives."""
    return (64 << 10) + int(1024 * seconds)


def _read_first(reply: Reply) -> Failed:
    reason = f"{MAX_ANSWER_BYTES} bytes of answers wait for you already: read them before asking for more"
    return Failed(reason=reason, tag=getattr(reply, "tag", 0))


def _bind(socket: zmq.Socket[bytes], address: str, endpoint: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise EndpointInUse(f"endpoint {endpoint} is in use: {address} is taken") from None
        raise BadInput(f"endpoint {endpoint} is not accepted: {address}: {error.strerror}") from None


def _send_big(socket: zmq.Socket[bytes], data: bytes) -> zmq.MessageTracker:
    tracker = socket.send(data, zmq.NOBLOCK, copy=False, track=True)
    assert tracker is not None, "a tracked send gives its tracker"
    return tracker


def _load_curve_key(path: Path) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"curve key {path} is not accepted: {error}") from None
    if secret is None:
        raise BadInput(f"curve key {path} is not accepted: it has no secret key")
    if path.stat().st_mode & 0o077:
        raise BadInput(f"curve key {path} is not accepted: others may read it (chmod 600 mends it)")
    return public, secret

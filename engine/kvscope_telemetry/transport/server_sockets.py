"""The engine's two sockets and the thread that owns them.

Owns binding, the I/O thread, encoding and decoding, heartbeats, and dropping messages for clients that do not read.
Must not depend on what commands do: it passes each command to `on_command`, and sends the arguments of `reply`.

A client is lost when a reply to it fails: ZeroMQ's ROUTER reports a closed connection on the next send (disconnect
notifications are a draft feature that released pyzmq lacks). A client with running requests is sent tokens
continuously, so its disconnection is noticed within a step of its first token; tcp connections also have ZMTP
heartbeats.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
import zmq

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.errors import BadInput, EndpointInUse, KvscopeError, ProtocolError
from kvscope_telemetry.messages.commands import MAX_COMMAND_BYTES, Command, Failed, Reply
from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.roles import Caller, Role, not_allowed
from kvscope_telemetry.messages.telemetry import MAX_TELEMETRY_BYTES, Frame, Heartbeat, TelemetryMessage
from kvscope_telemetry.messages.wire import answer_unreadable, decode_command, encode
from kvscope_telemetry.transport.authenticator import ZAP_ADDRESS, Authenticator
from kvscope_telemetry.transport.bind_address import IpcAddress, TcpAddress, parse_bind_address
from kvscope_telemetry.transport.connection_watch import Connections
from kvscope_telemetry.transport.endpoint_lock import EndpointLock, SocketFiles, private_umask
from kvscope_telemetry.transport.file_limit import raise_file_limit
from kvscope_telemetry.transport.reply_sender import ReplySender, send_tracked
from kvscope_telemetry.transport.socket_watch import SocketWatch
from kvscope_telemetry.transport.wakeup import Wakeup

NAP_S: Final = 0.001
CROWDED_HZ: Final = 2_000
"""Number of sent messages per second above which the I/O thread sleeps for `NAP_S` between passes."""
_LATELY_S: Final = 0.02
HEARTBEAT_S: Final = 0.5
CLOSE_S: Final = 0.5
"""Maximum time that `close` waits until queued messages reach the kernel."""
END_S: Final = 5.0
"""Maximum time that ZeroMQ may need to release closed sockets."""
BIG_BYTES: Final = 64 << 10
"""Messages of at least this size are passed to ZeroMQ without a copy, and count as in flight until ZeroMQ
releases them.
"""
MAX_BIG_BYTES_IN_FLIGHT: Final = 32 << 20
PUBLISH_HIGH_WATER: Final = 500
"""Maximum number of messages queued for a subscriber that does not read. Together with `BIG_BYTES` and
`MAX_BIG_BYTES_IN_FLIGHT`, this limits the queue to 64 MiB.

See docs/internals/decisions/0003-telemetry-never-waits.md.
"""
MAX_OUTBOX_MESSAGES: Final = 4096
MAX_OUTBOX_BYTES: Final = 32 << 20
MAX_COMMANDS_A_TURN: Final = 64
MAX_PARTS: Final = 16
"""Maximum number of parts of a multipart message that is answered with a refusal. If a client sends more, the
connection is closed.
"""
PARTS_S: Final = 0.005
"""Maximum time per pass for discarding the remaining parts of a refused multipart message. The next messages
can only be read after these parts.
"""
MAX_CONNECTIONS: Final = 256
"""Maximum number of connections on each of the two sockets."""
MAX_READ_BYTES: Final = MAX_COMMAND_BYTES + (1 << 20)
"""Maximum size of a command that is read. A command above `MAX_COMMAND_BYTES` is refused with a reason; one
above this size closes the connection.
"""
MAX_UNREAD_COMMANDS: Final = 4
"""Maximum number of commands per client in ZeroMQ's queue."""
MAX_SUBSCRIPTION_BYTES: Final = (128, 1024)
"""Maximum size of messages from a subscriber, without and with keys. ZeroMQ stores each subscription in about 48 times
its length and does not limit the number of subscriptions.

kvscope's subscription is empty. A handshake takes 40 bytes, or 300 with keys.
"""
MAX_UNSENT_REPLIES: Final = 256
"""Maximum number of replies per client in ZeroMQ's queue."""
HANDSHAKE_MS: Final = 2_000
TCP_HANDSHAKE_MS: Final = 5_000
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
MAX_PORT_ATTEMPTS: Final = 50


class ServerSockets:
    """PUB socket for telemetry and ROUTER socket for commands on `endpoint`, open from construction to `close`.

    The callbacks run on the I/O thread and must be fast: `on_command(client, command)` for each command, `heartbeat()`
    to get the next heartbeat, `on_client_lost(client)`, and `on_published(message, data)` for each message that is
    published. The `seq` of heartbeats is set here to the `seq` of the last frame sent.

    With `keys`, only clients on their allow-list may connect, each with its role; keys are required on tcp outside
    loopback. Without keys, all clients have the role `keyless` on tcp. On ipc, only this user can connect, and is
    always an operator.

    Raises BadInput for an endpoint that is not accepted, EndpointInUse if another engine uses the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_command: Callable[[bytes, Command], None],
        heartbeat: Callable[[], Heartbeat | None],
        keys: KeyRing | None = None,
        keyless: Role = Role.VIEWER,
        on_client_lost: Callable[[bytes], None] | None = None,
        on_published: Callable[[TelemetryMessage, bytes], None] | None = None,
    ) -> None:
        self._on_command = on_command
        self._on_published = on_published or (lambda message, data: None)
        self._heartbeat = heartbeat
        self._on_client_lost = on_client_lost or (lambda client: None)
        self._lock: EndpointLock | None = None
        self._files = SocketFiles()
        raise_file_limit()
        self._context = zmq.Context()
        self._door = self._context.socket(zmq.REP)
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._authenticator = Authenticator(endpoint, keys, keyless)
        self._poller = zmq.Poller()
        self._watch = SocketWatch(self._context, self._poller, idle_s=HEARTBEAT_S)
        self._subscribers = Connections(MAX_CONNECTIONS, _subscription_bytes)
        self._clients = Connections(MAX_CONNECTIONS, lambda seconds: (MAX_UNREAD_COMMANDS + 2) * MAX_READ_BYTES)
        try:
            self._door.bind(ZAP_ADDRESS)  # before the others: clients may connect once those are bound
            self._configure()
            self.telemetry_endpoint, self.command_endpoint = self._bind(endpoint)
            self._subscribers.listen(self.telemetry_endpoint)
            self._clients.listen(self.command_endpoint)
        except BaseException:
            self._release(linger_ms=0)
            raise
        self._outbox: Outbox = Outbox(MAX_OUTBOX_MESSAGES, MAX_OUTBOX_BYTES)
        self._replies: SimpleQueue[tuple[bytes, Reply | None]] = SimpleQueue()
        self._sender = ReplySender(self._router, self._on_client_lost, self._cut)
        self._spoke_last: dict[int, bytes] = {}
        """Client that sent the latest command on each connection, by file descriptor."""
        self._is_skipping = False
        self._big_messages: list[tuple[zmq.MessageTracker, int]] = []
        self._num_unsent = 0
        self._last_seq = 0
        self._must_bind = False
        self._closing = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kvscope-server-io", daemon=True)
        self._thread.start()

    @property
    def messages_dropped(self) -> int:
        """Number of messages dropped before they reached ZeroMQ, because the queue was full, too many large
        messages were in flight, or a message was too large or could not be encoded. Messages dropped by ZeroMQ
        appear as gaps.
        """
        return self._outbox.num_dropped + self._num_unsent

    def caller(self, client: bytes) -> Caller | None:
        """Return the user and role behind the latest command of `client`; None if the client's key was removed.
        Thread-safe.
        """
        return self._authenticator.caller(client)

    def publish(self, message: TelemetryMessage) -> None:
        """Send a message to all subscribers. Thread-safe; never waits."""
        self._outbox.put(message)
        self._wakeup.signal()

    def reply(self, client: bytes, message: Reply) -> None:
        """Send a reply to one client. Thread-safe; never waits."""
        self._replies.put((client, message))
        self._wakeup.signal()

    def cut(self, client: bytes) -> None:
        """Close the connection of a lost client, if it still exists, so that the client reconnects. Thread-safe."""
        self._replies.put((client, None))
        self._wakeup.signal()

    def close(self) -> None:
        """Send queued messages for at most half a second, end the thread, and release the endpoint. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wakeup.signal()
        self._thread.join()
        self._release(linger_ms=int(CLOSE_S * 1000))
        self._wakeup.close()

    # Setup, on the constructor's thread.

    def _configure(self) -> None:
        self._configure_publisher()
        self._router.router_mandatory = 1
        self._router.rcvhwm = MAX_UNREAD_COMMANDS
        self._router.sndhwm = MAX_UNSENT_REPLIES
        self._router.maxmsgsize = MAX_READ_BYTES
        self._router.handshake_ivl = HANDSHAKE_MS
        self._watch.attach(self._router, self._clients)
        self._authenticator.guard(self._router)

    def _configure_publisher(self) -> None:
        self._publisher.sndhwm = PUBLISH_HIGH_WATER
        self._publisher.maxmsgsize = MAX_SUBSCRIPTION_BYTES[self._authenticator.has_keys]
        self._publisher.handshake_ivl = HANDSHAKE_MS
        self._watch.attach(self._publisher, self._subscribers)
        self._authenticator.guard(self._publisher)

    def _bind(self, endpoint: str) -> tuple[str, str]:
        address = parse_bind_address(endpoint)
        if isinstance(address, TcpAddress):
            if not (address.is_loopback or self._authenticator.has_keys):
                raise BadInput(
                    f"endpoint {endpoint} is not accepted without keys: anyone could connect from outside; "
                    "keep the keys, or use tcp://127.0.0.1:PORT"
                )
            return self._bind_tcp(endpoint, address)
        return self._bind_ipc(endpoint, address)

    def _bind_ipc(self, endpoint: str, address: IpcAddress) -> tuple[str, str]:
        self._lock = EndpointLock(address.folder, endpoint)
        with private_umask():
            for socket, bound in ((self._publisher, address.telemetry), (self._router, address.command)):
                _bind(socket, bound, endpoint)
                self._files.record_bound_file(bound)
        return address.telemetry, address.command

    def _bind_tcp(self, endpoint: str, address: TcpAddress) -> tuple[str, str]:
        for socket in (self._publisher, self._router):
            _configure_tcp(socket, ipv6=":" in address.host)
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
        self._door.close(linger=0)
        self._watch.close()
        _end(self._context)
        self._files.remove()
        if self._lock is not None:
            self._lock.release()  # last: from here on, the next engine may bind

    # Everything below runs on the I/O thread.

    def _run(self) -> None:
        for source in (self._router, self._door, self._wakeup.reader):
            self._poller.register(source, zmq.POLLIN)
        next_beat, crowding = time.monotonic(), Crowding()
        while not self._closing:
            wait_s = max(0.0, min(next_beat, self._watch.next_check_s) - time.monotonic())
            if not self._sender.is_empty:
                wait_s = min(wait_s, self._sender.retry_s)
            ready = {source for source, _ in self._poller.poll(math.ceil(1000 * wait_s))}
            if self._wakeup.reader in ready:
                self._wakeup.clear()
            if self._door in ready:
                self._open_doors()
            self._watch.read(ready)
            if self._router in ready:
                self._read_commands()
            self._watch.check_limits()
            nap_s = crowding.nap_s(self._send_queued(), time.monotonic())
            if time.monotonic() >= next_beat:
                self._turn_away()
                self._beat()
                next_beat = time.monotonic() + HEARTBEAT_S
            if nap_s:
                time.sleep(nap_s)
        self._send_queued()
        self._sender.finish(CLOSE_S)

    def _open_doors(self) -> None:
        for _ in range(MAX_COMMANDS_A_TURN):
            try:
                self._door.send_multipart(self._authenticator.answer(self._door.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return
        self._wakeup.signal()

    def _turn_away(self) -> None:
        """Disconnect clients whose key was removed, so that their requests are released and they receive no more
        telemetry.

        ZeroMQ cannot disconnect a single subscriber, so all subscribers are disconnected. Those with a valid key
        reconnect automatically.
        """
        for client in self._authenticator.removed():
            self._on_client_lost(client)
        if self._authenticator.must_all_authenticate_again():
            self._watch.detach(self._publisher)
            self._publisher.close(linger=0)
            self._publisher = self._context.socket(zmq.PUB)
            self._subscribers = Connections(MAX_CONNECTIONS, _subscription_bytes)
            self._subscribers.listen(self.telemetry_endpoint)
            self._configure_publisher()
            _configure_tcp(self._publisher, ipv6="[" in self.telemetry_endpoint)
            self._must_bind = True
        if self._must_bind:
            with contextlib.suppress(
                KvscopeError
            ):  # the old socket may not be released yet: retried at the next heartbeat
                _bind(self._publisher, self.telemetry_endpoint, self.telemetry_endpoint)
                self._must_bind = False

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
            self._clients.record_activity(descriptor)
            self._authenticator.record_key(client, _user_id(command))
            if command.more:
                self._refuse_parts(client, descriptor)
            else:
                self._receive_command(client, command.bytes)
        self._wakeup.signal()

    def _cut(self, client: bytes) -> None:
        self._clients.cut(next((d for d, other in self._spoke_last.items() if other == client), -1))

    def _refuse_parts(self, client: bytes, descriptor: int) -> None:
        for num_parts in range(2, MAX_PARTS + 1):
            if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                self._sender.answer(client, Failed(reason=f"a command is one message part, not {num_parts}"))
                return
        self._is_skipping = True
        self._clients.cut(descriptor)

    def _skip_parts(self) -> bool:
        """Discard remaining parts of a multipart message for up to `PARTS_S`. Returns whether the message's end
        was reached.
        """
        deadline = time.monotonic() + PARTS_S
        while time.monotonic() < deadline:
            for _ in range(1_000):
                if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                    self._is_skipping = False
                    return True
        return False

    def _receive_command(self, client: bytes, data: bytes) -> None:
        try:
            command = decode_command(data)
            refusal = not_allowed(self._authenticator.caller(client), command)
            if refusal is not None:
                self._sender.answer(client, refusal)
            else:
                self._on_command(client, command)
        except ProtocolError as error:
            self._sender.answer(client, answer_unreadable(data, str(error)))
        except Exception as error:  # a client's message must not end the thread that serves all of them
            self._sender.answer(client, Failed(reason=f"the engine failed on this command: {error!r:.200}"))

    def _send_queued(self) -> int:
        messages = self._outbox.drain()
        for message in messages:
            self._send_telemetry(message)
        self._sender.retry()
        while True:
            try:
                client, reply = self._replies.get_nowait()
            except Empty:
                return len(messages)
            if reply is not None:
                self._sender.answer(client, reply)
            elif self._sender.notify_lost(client):
                self._cut(client)

    def _beat(self) -> None:
        try:
            message = self._heartbeat()
        except Exception:  # a failed heartbeat is simply missing, which is what it reports
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
        self._on_published(message, data)
        if len(data) < BIG_BYTES:
            self._publisher.send(data, zmq.NOBLOCK)
        elif len(data) <= MAX_TELEMETRY_BYTES and self._has_capacity(len(data)):
            self._big_messages.append((send_tracked(self._publisher, data), len(data)))
        else:
            self._num_unsent += 1

    def _has_capacity(self, num_bytes: int) -> bool:
        self._big_messages = [(tracker, size) for tracker, size in self._big_messages if not tracker.done]
        in_flight = sum(size for _, size in self._big_messages)
        return not in_flight or in_flight + num_bytes <= MAX_BIG_BYTES_IN_FLIGHT


def _subscription_bytes(seconds: float) -> int:
    """Return the maximum bytes that a subscriber sends in this time: one subscription and occasional heartbeats."""
    return (64 << 10) + int(1024 * seconds)


def _end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate the context on a separate thread, waiting for at most `END_S`.

    Termination was seen to wait forever for a closed socket. Without the limit, `close` might then never return.
    """
    ending = threading.Thread(target=context.term, name="kvscope-zmq-end", daemon=True)
    ending.start()
    ending.join(END_S)


def _bind(socket: zmq.Socket[bytes], address: str, endpoint: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise EndpointInUse(f"endpoint {endpoint} is in use: {address} is taken") from None
        raise BadInput(f"endpoint {endpoint} is not accepted: {address}: {error.strerror}") from None


def _configure_tcp(socket: zmq.Socket[bytes], *, ipv6: bool) -> None:
    socket.ipv6 = ipv6
    socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
    socket.handshake_ivl = TCP_HANDSHAKE_MS


def _user_id(part: zmq.Frame) -> str:
    """Return the public key that the connection authenticated with; empty without keys."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Crowding:
    """Decides when the I/O thread should sleep so that messages accumulate. Each pass of the thread costs as much time
    as sending many messages, and holds the GIL, which the thread that produces the messages needs.

    Measures the recent rate of messages. Steps of an engine with a model are far less frequent and are never delayed.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._num_messages = 0
        self._is_crowded = False

    def nap_s(self, num_messages: int, now_s: float) -> float:
        """Return the seconds to sleep after a pass that sent `num_messages` and ended at `now_s` (monotonic clock)."""
        self._num_messages += num_messages
        lasted_s = now_s - self._since_s
        if lasted_s >= _LATELY_S:
            self._is_crowded = self._num_messages >= CROWDED_HZ * lasted_s
            self._since_s, self._num_messages = now_s, 0
        return NAP_S if self._is_crowded and num_messages else 0.0


class Outbox:
    """Queue of messages from the engine's thread to the I/O thread, bounded in number and bytes.

    When it is full, the oldest messages are dropped and counted in `num_dropped`. `put` costs the engine's thread about
    a microsecond and never waits.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.num_dropped = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[TelemetryMessage, int]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, message: TelemetryMessage) -> None:
        """Append a message. The newest message is retained even if it alone exceeds the limit on bytes."""
        num_bytes = approximate_bytes(message)
        with self._lock:
            self._messages.append((message, num_bytes))
            self._num_bytes += num_bytes
            while self._is_over():
                self._num_bytes -= self._messages.popleft()[1]
                self.num_dropped += 1

    def drain(self) -> list[TelemetryMessage]:
        with self._lock:
            messages, self._messages, self._num_bytes = self._messages, deque(), 0
        return [message for message, _ in messages]

    def _is_over(self) -> bool:
        too_much = len(self._messages) > self._max_messages or self._num_bytes > self._max_bytes
        return too_much and len(self._messages) > 1

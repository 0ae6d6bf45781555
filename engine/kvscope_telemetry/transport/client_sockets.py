"""A client's two sockets, SUB and DEALER, its queued commands, and its unfinished requests.

Owns connecting, interpreting refusals, and disconnecting from a peer that floods this client. ZeroMQ reconnects
automatically while the sockets are open, except after a refusal or a flood. All but `ClientSockets.wake` and
`Outgoing.put` must be called on the reading thread. The sockets transfer bytes, not messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvscope_telemetry.credentials.key_files import ClientKey
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import (
    MAX_AWAITED,
    MAX_COMMAND_BYTES,
    Accepted,
    Awaited,
    Command,
    Finished,
    Refused,
    Reply,
    Submit,
    Tokens,
    refuse,
)
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, MAX_TELEMETRY_BYTES
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.transport.connection_watch import Connections
from kvscope_telemetry.transport.endpoints import endpoints, is_ipv6, require_curve
from kvscope_telemetry.transport.ssh_tunnel import SCHEME, SshAddress, SshTunnel
from kvscope_telemetry.transport.unreachable_engine import UnreachableEngine
from kvscope_telemetry.transport.wakeup import Wakeup

RECEIVE_HIGH_WATER: Final = 10_000
"""Maximum number of telemetry messages queued for the reading thread: two seconds at 5,000 per second. The
limit is lower for large messages.
"""
REPLY_HIGH_WATER: Final = 1_000
SEND_HIGH_WATER: Final = 1_000
BIG_BYTES: Final = 64 << 10
"""Commands of at least this size are sent one at a time. Commands that an engine does not read thus stay in
this module's queue and are counted there.
"""
RECONNECT_MS: Final = (50, 1_000)
LINGER_MS: Final = 200
"""Time in milliseconds for which closing a socket waits until commands sent shortly before, such as an abort or
a shutdown, are transmitted.
"""
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
"""Interval and timeout of ZMTP heartbeats, by which ZeroMQ detects and reopens a silently broken tcp
connection. ipc does not need heartbeats, because it reports disconnections immediately.
"""
KNOCK_AGAIN_S: Final = 0.5
WATCH_S: Final = 0.25
MAX_CONNECTIONS: Final = 16
"""Maximum number of connections per socket. One is in use; any further ones are being closed."""
MAX_BURST_BYTES: Final = 64 << 20
"""Number of bytes that may be read without ever finding the queue empty, in addition to the largest message.
More bytes count as a flood. After a flood, the new connection may queue about this many bytes.
"""
MAX_READ_BYTES: Final = 16 << 20
"""Number of bytes after which a `receive` call reads no further message, because decoded messages take several
times as much memory.
"""
MIN_HIGH_WATER: Final = 2
PARTS_S: Final = 0.005
"""Maximum time per call for discarding the remaining parts of a multipart message. The next messages can only
be read after these parts.
"""
HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FINAL_EVENTS: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""Events after which ZeroMQ does not reconnect automatically."""
MAX_HANG_UPS: Final = 3
"""Number of consecutive disconnections during the handshake that are reported as a refusal. A single one has
many possible causes (an engine that just ended, a tunnel without an engine).
"""

MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
MAX_WAIT_NS: Final = 5_000_000_000
"""Maximum time for which a command is queued before it is refused."""
NO_ENGINE: Final = "the engine does not answer"
ENDED: Final = -1
"""Value in `Awaited.heard`, instead of a number of replies, for a completion that has ended."""


class ClientSockets:
    """Sockets to the engine at `endpoint`, connecting from construction to `close`.

    Args:
        key: The client's key, which also identifies the expected engine.
        subscribes: Whether to receive telemetry; otherwise only replies to commands.
        context: Shared context for a client of many engines, which must terminate it after closing their sockets: each
            context has its own threads.

    Raises:
        BadInput: The endpoint is not accepted, or is outside loopback and there is no key.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: ClientKey | None = None,
        subscribes: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        require_curve(endpoint, has_keys=key is not None)
        self._tunnel = SshTunnel(SshAddress.parse(endpoint)) if endpoint.startswith(f"{SCHEME}://") else None
        self.is_ipc = endpoint.startswith("ipc")
        """Whether the endpoint is `ipc://`, so that the engine is certainly on this machine."""
        named, endpoint = endpoint, endpoint if self._tunnel is None else self._tunnel.endpoint
        addresses = endpoints(endpoint)
        self._wakeup = Wakeup()
        self._own_context = zmq.Context() if context is None else None
        context = self._own_context or context
        assert context is not None
        self._command = context.socket(zmq.DEALER)
        telemetry = context.socket(zmq.SUB)
        _configure(telemetry, key, endpoint, MAX_TELEMETRY_BYTES)
        _configure(self._command, key, endpoint, MAX_MESSAGE_BYTES)
        if subscribes:
            telemetry.subscribe(b"")
        self._command.sndhwm = SEND_HIGH_WATER
        self._command.immediate = 1  # do not queue commands without a connection
        self._telemetry_line = _Line(telemetry, addresses.telemetry, Handshakes(named, key), RECEIVE_HIGH_WATER)
        self._command_line = _Line(self._command, addresses.command, Handshakes(named, key), REPLY_HIGH_WATER)
        self._lines = (self._telemetry_line, self._command_line)
        self._pollers = {replies: self._make_poller(replies=replies) for replies in (False, True)}
        self._big_command: zmq.MessageTracker | None = None
        self._absence = UnreachableEngine(endpoint)

    def wait(self, timeout_ms: int, *, replies: bool = True) -> None:
        """Return when a message arrived (a reply only if `replies`), when `wake` is called, or after `timeout_ms`."""
        ready = {source for source, _ in self._pollers[replies].poll(timeout_ms)}
        if self._wakeup.reader in ready:
            self._wakeup.clear()
        now_s = time.monotonic()
        for line in self._lines:
            line.poll(now_s, has_news=line.monitor in ready)
        line = self._telemetry_line
        self._absence.poll(now_s, is_open=line.is_open, is_up=line.is_up)

    def _make_poller(self, *, replies: bool) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.monitor, zmq.POLLIN)
            if replies or line is not self._command_line:
                poller.register(line.socket, zmq.POLLIN)
        return poller

    def wake(self) -> None:
        """Make `wait` return now. Thread-safe."""
        self._wakeup.signal()

    def receive_telemetry(self, max_messages: int) -> list[bytes]:
        """Return queued telemetry messages, oldest first (limits: `Intake.receive`)."""
        return self._telemetry_line.receive(max_messages)

    def receive_replies(self, max_messages: int) -> list[bytes]:
        """Return queued replies, oldest first (limits: `Intake.receive`)."""
        return self._command_line.receive(max_messages)

    def send(self, command: bytes) -> bool:
        """Send a command if there is a connection that accepts it. Returns False otherwise."""
        is_big = len(command) >= BIG_BYTES
        if is_big and self._big_command is not None and not self._big_command.done:
            return False
        try:
            if is_big:
                self._big_command = self._command.send(command, zmq.NOBLOCK, copy=False, track=True)
            else:
                self._command.send(command, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def num_connections(self) -> int:
        """Number of connections that the command socket has had so far. It changes with each new connection."""
        return self._command_line.handshakes.num_done

    @property
    def refusal(self) -> str:
        """Sentence saying why the engine refuses a connection; empty if it does not."""
        refusal = self._command_line.handshakes.refusal or self._telemetry_line.handshakes.refusal
        is_hung_up_by_ssh = self._tunnel is not None and self._tunnel.has_complained
        return "" if is_hung_up_by_ssh else refusal

    @property
    def absence(self) -> str:
        """Sentence saying why there is no connection; empty if there is a connection, or the reason is not
        known yet.
        """
        return self._absence.why if self._tunnel is None else self._tunnel.why

    @property
    def num_cut(self) -> int:
        """Number of connections closed here because of a flood, plus the number of messages that are not in our
        protocol.
        """
        return sum(line.num_cut for line in self._lines)

    @property
    def is_connected(self) -> bool:
        """Whether the command socket has a connection that accepts messages and is included in `num_connections`."""
        return self._command_line.is_up and bool(int(self._command.get(zmq.EVENTS)) & zmq.POLLOUT)

    def close(self) -> None:
        """Close both sockets, and the context unless it is shared. Takes little longer than `LINGER_MS`."""
        self._absence.close()
        self._telemetry_line.close(linger_ms=0)
        self._command_line.close(linger_ms=LINGER_MS)
        if self._own_context is not None:
            self._own_context.term()
        if self._tunnel is not None:
            self._tunnel.close()
        self._wakeup.close()


def _configure(socket: zmq.Socket[bytes], key: ClientKey | None, endpoint: str, max_bytes: int) -> None:
    socket.maxmsgsize = max_bytes
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
    socket.ipv6 = is_ipv6(endpoint)
    if endpoint.startswith("tcp"):
        socket.heartbeat_ivl, socket.heartbeat_timeout = TCP_HEARTBEAT_MS
    if key is not None:
        socket.curve_serverkey = key.engine.encode("ascii")
        socket.curve_publickey = key.public.encode("ascii")
        socket.curve_secretkey = key.secret.encode("ascii")


class _Line:
    """One of the client's two sockets, with its monitor, handshakes, received messages, and connection limits.

    `socket`, with all its options set, is connected to `address`; at most `high_water` messages are queued in it.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str, handshakes: Handshakes, high_water: int) -> None:
        self.socket = socket
        self.handshakes = handshakes
        events = HANDSHAKE_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        self.monitor = socket.get_monitor_socket(events)
        self._address = address
        self._intake = Intake(socket, high_water)
        max_bytes = int(socket.get(zmq.MAXMSGSIZE)) + MAX_BURST_BYTES
        self._connections = Connections(MAX_CONNECTIONS, lambda seconds: max_bytes, is_client=True)
        self._connections.listen(address)
        self._num_floods = 0
        self._retry_s: float | None = None
        self._poll_s = 0.0
        self._descriptor = -1
        self.is_up = False
        """Whether the monitor reported that the current connection's handshake is complete.

        ZeroMQ accepts messages for the connection slightly earlier. A command sent then would reach the engine before
        the message that introduces this client, because the connection is not yet known to be new.
        """
        socket.connect(address)

    @property
    def is_open(self) -> bool:
        """Whether a peer accepted the connection, even if it does not speak ZeroMQ's protocol."""
        return self._descriptor >= 0

    @property
    def num_cut(self) -> int:
        """Number of connections closed here, plus the number of multipart messages that were discarded."""
        return self._connections.num_cut + self._num_floods + self._intake.num_refused

    def receive(self, max_messages: int) -> list[bytes]:
        """Return queued messages, oldest first (`Intake.receive`). Reconnects after a flood."""
        messages = self._intake.receive(max_messages)
        if messages:
            self._connections.record_activity_on_all()
        if self._intake.is_flooded and not self._intake.is_skipping:
            self._num_floods += 1
            self._reconnect()
        return messages

    def poll(self, now_s: float, *, has_news: bool = True) -> None:
        """Process the monitor's events if it `has_news`, reconnect after a refusal, and enforce the connection
        limits.
        """
        while has_news and self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            self._handle_event(zmq.Event(message["event"]), int(message["value"]), now_s)
        if self._retry_s is not None and now_s >= self._retry_s and not self._intake.is_skipping:
            self._retry_s = None  # ZeroMQ does not retry after a refusal, but the key may be added to the list
            self._reconnect()
        if now_s >= self._poll_s:
            self._poll_s = now_s + WATCH_S
            self._connections.watch()

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)

    def _handle_event(self, event: zmq.Event, descriptor: int, now_s: float) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connections.accepted(descriptor)
            self._descriptor, self.is_up = descriptor, False
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.closed(descriptor)
            self.is_up = self.is_up and descriptor != self._descriptor
            self._descriptor = -1 if descriptor == self._descriptor else self._descriptor
        else:
            self.handshakes.handle(event)
            self.is_up = self.is_up or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in FINAL_EVENTS:
                self._retry_s = now_s + KNOCK_AGAIN_S

    def _reconnect(self) -> None:
        """Reconnect. Queued messages are discarded."""
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ may already have dropped the address
            self.socket.disconnect(self._address)
        self._intake.begin()
        self.socket.connect(self._address)


class Intake:
    """Reads complete messages from `socket`, a limited number of bytes at a time, and detects floods.

    ZeroMQ limits the number of queued messages (`high_water`), not their bytes. A limit that suits small messages would
    allow large ones to use all memory. Changing the limit of an existing connection can block both ends forever.
    Therefore, a flood ends the connection, and the next one starts with a limit that fits the size of the received
    messages.
    """

    def __init__(self, socket: zmq.Socket[bytes], high_water: int) -> None:
        self.num_refused = 0
        """Number of discarded multipart messages: our protocol has none."""
        self.is_skipping = False
        """Whether a multipart message is partly read. The connection must not be closed in this state."""
        self._socket = socket
        self._high_water = high_water
        self._burst_bytes = 0  # read since the queue was last empty
        self._largest = 0
        self.begin()

    @property
    def is_flooded(self) -> bool:
        """Whether messages arrive faster than they can be read."""
        return self._burst_bytes - self._largest > MAX_BURST_BYTES

    def begin(self) -> None:
        """Set the socket's high-water mark. Must be called before each connection. After a flood, the mark
        depends on the size of the messages received so far.
        """
        mark = max(MIN_HIGH_WATER, MAX_BURST_BYTES // self._largest) if self.is_flooded else self._high_water
        self._socket.rcvhwm = min(mark, self._high_water)
        self._burst_bytes = self._largest = 0

    def receive(self, max_messages: int) -> list[bytes]:
        """Return queued messages, oldest first, up to `max_messages` or until `MAX_READ_BYTES` are reached."""
        messages: list[bytes] = []
        num_bytes = 0
        try:
            while len(messages) < max_messages and num_bytes < MAX_READ_BYTES:
                if self.is_skipping and not self._skip_parts():
                    break
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)  # a Frame knows `more`; querying RCVMORE costs more
                if frame.more:
                    self.is_skipping = True
                    self.num_refused += 1
                else:
                    data = frame.bytes
                    messages.append(data)
                    num_bytes += len(data)
                    self._largest = max(self._largest, len(data))
        except zmq.Again:
            self._burst_bytes = self._largest = 0
        else:
            self._burst_bytes += num_bytes
        return messages

    def _skip_parts(self) -> bool:
        """Discard remaining parts of a multipart message for up to `PARTS_S`. Returns whether the message's end
        was reached.
        """
        deadline = time.monotonic() + PARTS_S
        while time.monotonic() < deadline:
            self._socket.recv(zmq.NOBLOCK)
            if not self._socket.rcvmore:
                self.is_skipping = False
                return True
        return False


class Handshakes:
    """Results of the connection attempts of one socket, with texts for users. May be read from any thread."""

    def __init__(self, endpoint: str, key: ClientKey | None) -> None:
        self.num_done = 0
        """Number of connections that this socket has had so far. It changes with each new connection."""
        self.refusal = ""
        """Sentence saying why the peer refuses the connection; empty if it does not, or there is no peer."""
        self._endpoint = endpoint
        self._key = key
        self._num_hang_ups = 0

    def handle(self, event: zmq.Event) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_done += 1
            self.refusal, self._num_hang_ups = "", 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self._unknown_key()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.refusal = self._other_mechanism()
        else:
            self._num_hang_ups += 1
            if self._num_hang_ups >= MAX_HANG_UPS:
                self.refusal = self.refusal or self._hung_up()

    def _unknown_key(self) -> str:
        name = repr(self._key.name) if self._key is not None else "there is none"
        return f"the engine at {self._endpoint} does not know this key ({name})"

    def _other_mechanism(self) -> str:
        if self._key is None:
            return f"the engine at {self._endpoint} needs a key: use --key FILE"
        return f"the engine at {self._endpoint} uses no keys: connect with --key none"

    def _hung_up(self) -> str:
        if self._key is None:
            return f"{self._endpoint} closes the connection: it may need a key (--key FILE), or not be an engine"
        return (
            f"{self._endpoint} closes the connection for key {self._key.name!r}: another engine's key, an "
            "engine without keys (--key none), or not an engine"
        )


class Outgoing:
    """FIFO queue of commands to be sent to the engine, bounded in number and bytes.

    Any thread may add commands; the reading thread sends them. A command that is not sent within `MAX_WAIT_NS` is
    answered here with a refusal, so that none is lost silently or sent to an engine started later.
    """

    def __init__(self) -> None:
        self._commands: deque[tuple[int, Command, bytes]] = deque()
        self._bytes_queued = 0  # written under the lock; _bytes_gone by the reading thread only
        self._bytes_sent = 0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._commands

    def put(self, command: Command) -> None:
        """Append a command. Raises BadInput if it exceeds the size limit, EngineDead if too many are queued."""
        data = encode(command)
        if len(data) > MAX_COMMAND_BYTES:
            raise BadInput(f"a command of {len(data)} bytes is not accepted: must be at most {MAX_COMMAND_BYTES}")
        with self._lock:
            num_bytes = self._bytes_queued - self._bytes_sent
            if len(self._commands) >= MAX_WAITING or (num_bytes and num_bytes + len(data) > MAX_WAITING_BYTES):
                raise EngineDead(
                    f"{NO_ENGINE}: {len(self._commands)} commands with {num_bytes} bytes are queued already"
                )
            self._bytes_queued += len(data)
            self._commands.append((time.monotonic_ns(), command, data))

    def send_all(self, send: Callable[[bytes], bool], sent: Callable[[Command], None] = lambda command: None) -> None:
        """Pass commands to `send`, oldest first, until it returns False. `sent` is called for each that was sent."""
        while self._commands and send(self._commands[0][2]):
            sent(self._pop())

    def expired(self, now_ns: int) -> list[Reply]:
        """Remove the commands that were queued for longer than `MAX_WAIT_NS`, and return a refusal for each."""
        replies: list[Reply] = []
        while self._commands and now_ns - self._commands[0][0] > MAX_WAIT_NS:
            replies.append(refuse(self._pop(), NO_ENGINE))
        return replies

    def _pop(self) -> Command:
        _, command, data = self._commands.popleft()
        self._bytes_sent += len(data)
        return command


class AwaitedRequests:
    """This client's unfinished requests and the number of replies received for each, which it reports to the engine
    after a reconnection.

    Must be fed every command that was sent and every reply received, on the reading thread.
    """

    def __init__(self) -> None:
        self._heard: dict[str, list[int]] = {}

    def sent(self, command: Command) -> None:
        if isinstance(command, Submit) and len(self._heard) < MAX_AWAITED:
            self._heard.setdefault(command.request_id, [])

    def record_reply(self, reply: Reply) -> None:
        if isinstance(reply, Refused):
            if not self._heard.get(reply.request_id):  # otherwise, a second request with the same id was refused
                self._heard.pop(reply.request_id, None)
        elif isinstance(reply, Accepted):
            if reply.request_id in self._heard:
                self._heard[reply.request_id] = [0] * len(reply.numbers)
        elif isinstance(reply, Tokens | Finished):
            self._count(reply)

    @property
    def ids(self) -> list[str]:
        return list(self._heard)

    def all(self) -> tuple[Awaited, ...]:
        """Return the unfinished requests in the form in which they are reported to the engine after a reconnection."""
        return tuple(Awaited(request_id=name, heard=tuple(counts)) for name, counts in self._heard.items())

    def _count(self, reply: Tokens | Finished) -> None:
        counts = self._heard.get(reply.request_id)
        if counts is None or not 0 <= reply.index < max(1, len(counts)):
            return
        if not counts:  # it ended without being accepted
            del self._heard[reply.request_id]
        elif isinstance(reply, Tokens):
            counts[reply.index] += 1
        else:
            counts[reply.index] = ENDED
            if all(count == ENDED for count in counts):
                del self._heard[reply.request_id]

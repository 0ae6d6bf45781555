"""A client's end: two sockets, SUB and DEALER, the commands that wait to leave, and the requests that have not ended.

Owns connecting, what a refusal means, and an end to what is sent without end. Reconnecting is ZeroMQ's work and goes on
for as long as the sockets are open, but after a refusal and after a flood. Everything but `ClientSockets.wake` and
`Outgoing.put` belongs to the one thread that reads; the sockets know bytes, not messages.
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

from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.keys.key_files import ClientKey
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
from kvscope_telemetry.sockets.absence import Absence
from kvscope_telemetry.sockets.connection_watch import Connections
from kvscope_telemetry.sockets.endpoints import endpoints, is_ipv6, require_curve
from kvscope_telemetry.sockets.ssh_tunnel import SCHEME, SshAddress, SshTunnel
from kvscope_telemetry.sockets.wakeup import Wakeup

RECEIVE_HIGH_WATER: Final = 10_000
"""Telemetry messages that wait here for the reading thread: two seconds at 5,000 a second. Fewer of large ones."""
REPLY_HIGH_WATER: Final = 1_000
SEND_HIGH_WATER: Final = 1_000
BIG_BYTES: Final = 64 << 10
"""Commands from this size leave one at a time: what an engine does not read waits where it is counted."""
RECONNECT_MS: Final = (50, 1_000)
LINGER_MS: Final = 200
"""A command sent right before the end (an abort, a shutdown) gets this long to leave."""
TCP_HEARTBEAT_MS: Final = (2_000, 10_000)
"""A tcp connection that died without a word is opened anew; ipc tells at once."""
KNOCK_AGAIN_S: Final = 0.5
WATCH_S: Final = 0.25
MAX_CONNECTIONS: Final = 16
"""There is one; those beside it are on their way out."""
MAX_BURST_BYTES: Final = 64 << 20
"""Read without once finding nothing, beside the largest message; as much may wait on the connection after a flood."""
MAX_READ_BYTES: Final = 16 << 20
"""Read at a time, and one message more: decoded they take several times as much."""
MIN_HIGH_WATER: Final = 2
PARTS_S: Final = 0.005
"""Time at a go for the rest of a message of many parts: it must be read to get at those after it."""
HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FINAL_EVENTS: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""After these ZeroMQ does not try again by itself."""
HANG_UPS_TO_TELL: Final = 3
"""A hang-up has many reasons (an engine that just ends, a tunnel with nothing behind it): so many in a row are told."""

MAX_WAITING: Final = 10_000
"""Commands that wait to leave."""
MAX_WAITING_BYTES: Final = 64 << 20
MAX_WAIT_NS: Final = 5_000_000_000
"""For an engine."""
NO_ENGINE: Final = "the engine does not answer"
ENDED: Final = -1
"""In `Awaited.heard`, of a completion."""


class ClientSockets:
    """Sockets to the engine at `endpoint`, connecting from construction to `close`.

    `key` says who the client is, and which engine it expects; who does not subscribe has the command socket alone to
    listen to. Whoever watches many engines gives one `context` to all, and ends it after them: each context has threads
    of its own. Raises BadInput for an endpoint that is not accepted, also one outside loopback without a key.
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
        """Whether the engine is on this machine for certain."""
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
        self._command.immediate = 1  # nothing queues for an engine that is not there
        self._telemetry_line = _Line(telemetry, addresses.telemetry, Handshakes(named, key), RECEIVE_HIGH_WATER)
        self._command_line = _Line(self._command, addresses.command, Handshakes(named, key), REPLY_HIGH_WATER)
        self._lines = (self._telemetry_line, self._command_line)
        self._pollers = {replies: self._make_poller(replies=replies) for replies in (False, True)}
        self._big_command: zmq.MessageTracker | None = None
        self._absence = Absence(endpoint)

    def wait(self, timeout_ms: int, *, replies: bool = True) -> None:
        """Return when something arrived, when woken, or after `timeout_ms`; `replies`: also for those."""
        ready = {source for source, _ in self._pollers[replies].poll(timeout_ms)}
        if self._wakeup.reader in ready:
            self._wakeup.clear()
        now_s = time.monotonic()
        for line in self._lines:
            line.look(now_s, has_news=line.monitor in ready)
        line = self._telemetry_line
        self._absence.look(now_s, is_open=line.is_open, is_up=line.is_up)

    def _make_poller(self, *, replies: bool) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.monitor, zmq.POLLIN)
            if replies or line is not self._command_line:
                poller.register(line.socket, zmq.POLLIN)
        return poller

    def wake(self) -> None:
        """End `wait` now. From any thread."""
        self._wakeup.signal()

    def receive_telemetry(self, max_messages: int) -> list[bytes]:
        """What waits on the telemetry socket, oldest first, as far as it is not too much at a time."""
        return self._telemetry_line.receive(max_messages)

    def receive_replies(self, max_messages: int) -> list[bytes]:
        """What waits on the command socket, oldest first, as far as it is not too much at a time."""
        return self._command_line.receive(max_messages)

    def send(self, command: bytes) -> bool:
        """Hand a command to a live connection; False when there is none, or it takes no more."""
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
        """How many the command socket has had: a new number is a new connection."""
        return self._command_line.handshakes.num_done

    @property
    def refusal(self) -> str:
        """Why the engine does not let one of the sockets in, in one sentence; empty when nothing is wrong."""
        refusal = self._command_line.handshakes.refusal or self._telemetry_line.handshakes.refusal
        is_hung_up_by_ssh = self._tunnel is not None and self._tunnel.has_complained
        return "" if is_hung_up_by_ssh else refusal

    @property
    def absence(self) -> str:
        """Why there is no connection, in one sentence; empty while there is one, and before that is known."""
        return self._absence.why if self._tunnel is None else self._tunnel.why

    @property
    def num_cut(self) -> int:
        """Connections ended here because the engine sent without end, and messages that are none of ours."""
        return sum(line.num_cut for line in self._lines)

    @property
    def is_connected(self) -> bool:
        """Whether the command socket has a connection that takes messages, and that `num_connections` counts."""
        return self._command_line.is_up and bool(int(self._command.get(zmq.EVENTS)) & zmq.POLLOUT)

    def close(self) -> None:
        """Close both sockets, and the context where it is ours; returns within `LINGER_MS` and a little."""
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
    """One of the sockets with all that watches over it: how handshakes went, what waits, who sends without end.

    `socket` connects to `address` from here on; options are set before, at most `high_water` messages wait in it.
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
        self._look_s = 0.0
        self._descriptor = -1
        self.is_up = False
        """Whether the monitor told of the handshake of the connection that there is. ZeroMQ takes messages for it a
        moment before: who sent them then would speak before it knows that it is a new connection."""
        socket.connect(address)

    @property
    def is_open(self) -> bool:
        """Whether somebody took the connection, who may not speak ZeroMQ's protocol."""
        return self._descriptor >= 0

    @property
    def num_cut(self) -> int:
        """Connections ended here, and messages of several parts that were thrown away."""
        return self._connections.num_cut + self._num_floods + self._intake.num_refused

    def receive(self, max_messages: int) -> list[bytes]:
        """What waits, oldest first; see `Intake`."""
        messages = self._intake.receive(max_messages)
        if messages:
            self._connections.heard_all()
        if self._intake.is_flooded and not self._intake.is_skipping:
            self._num_floods += 1
            self._connect_anew()
        return messages

    def look(self, now_s: float, *, has_news: bool = True) -> None:
        """What became of the connection, where the monitor `has_news`; connects anew where ZeroMQ gave up, cuts off who
        sends without end."""
        while has_news and self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            self._take(zmq.Event(message["event"]), int(message["value"]), now_s)
        if self._retry_s is not None and now_s >= self._retry_s and not self._intake.is_skipping:
            self._retry_s = None  # after a refusal ZeroMQ does not try again by itself, but keys may come to be known
            self._connect_anew()
        if now_s >= self._look_s:
            self._look_s = now_s + WATCH_S
            self._connections.watch()

    def close(self, linger_ms: int) -> None:
        """The socket and its monitor."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)

    def _take(self, event: zmq.Event, descriptor: int, now_s: float) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connections.accepted(descriptor)
            self._descriptor, self.is_up = descriptor, False
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.closed(descriptor)
            self.is_up = self.is_up and descriptor != self._descriptor
            self._descriptor = -1 if descriptor == self._descriptor else self._descriptor
        else:
            self.handshakes.take(event)
            self.is_up = self.is_up or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in FINAL_EVENTS:
                self._retry_s = now_s + KNOCK_AGAIN_S

    def _connect_anew(self) -> None:
        """What waits is thrown away."""
        with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the address as well
            self.socket.disconnect(self._address)
        self._intake.begin()
        self.socket.connect(self._address)


class Intake:
    """Reads whole messages off `socket`, so many bytes at a time, and notices a flood. At most `high_water` wait in it.

    ZeroMQ counts messages, not bytes: what it may hold of small ones would be all memory of large ones. A mark that is
    changed on a connection can leave either end waiting for ever, so a flood ends the connection, and the next one
    begins with a mark for messages of that size.
    """

    def __init__(self, socket: zmq.Socket[bytes], high_water: int) -> None:
        self.num_refused = 0
        """Messages of several parts: ours have one."""
        self.is_skipping = False
        """In the middle of such a message: the connection must not be given up."""
        self._socket = socket
        self._high_water = high_water
        self._burst_bytes = 0  # read since nothing waited
        self._largest = 0
        self.begin()

    @property
    def is_flooded(self) -> bool:
        """Whether more comes than can be read."""
        return self._burst_bytes - self._largest > MAX_BURST_BYTES

    def begin(self) -> None:
        """Before a connection is made; after a flood with a mark that the messages of the flood suggest."""
        mark = max(MIN_HIGH_WATER, MAX_BURST_BYTES // self._largest) if self.is_flooded else self._high_water
        self._socket.rcvhwm = min(mark, self._high_water)
        self._burst_bytes = self._largest = 0

    def receive(self, max_messages: int) -> list[bytes]:
        """What waits, oldest first: so many messages, or `MAX_READ_BYTES` and one more."""
        messages: list[bytes] = []
        num_bytes = 0
        try:
            while len(messages) < max_messages and num_bytes < MAX_READ_BYTES:
                if self.is_skipping and not self._skip_parts():
                    break
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)  # it knows whether more follows: to ask costs more
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
        """Read on to the end of a message of several parts, for a moment; whether it is reached."""
        deadline = time.monotonic() + PARTS_S
        while time.monotonic() < deadline:
            self._socket.recv(zmq.NOBLOCK)
            if not self._socket.rcvmore:
                self.is_skipping = False
                return True
        return False


class Handshakes:
    """How attempts to connect one socket went, and what a person is told of a refusal. Any thread may read."""

    def __init__(self, endpoint: str, key: ClientKey | None) -> None:
        self.num_done = 0
        """Connections of this socket that were made so far: a new number is a new connection."""
        self.refusal = ""
        """Why the other end does not let us in, in one sentence; empty when it does, or there is none."""
        self._endpoint = endpoint
        self._key = key
        self._num_hang_ups = 0

    def take(self, event: zmq.Event) -> None:
        """One event of the monitor."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_done += 1
            self.refusal, self._num_hang_ups = "", 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self._unknown_key()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.refusal = self._other_mechanism()
        else:
            self._num_hang_ups += 1
            if self._num_hang_ups >= HANG_UPS_TO_TELL:
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
    """Commands on their way to the engine: a queue, bounded in number and bytes.

    Any thread puts commands, the reading thread sends them and hears the answers. A command that finds no engine for
    `MAX_WAIT_NS` is answered here, so that nothing is lost without a word and no engine started later gets it.
    """

    def __init__(self) -> None:
        self._commands: deque[tuple[int, Command, bytes]] = deque()
        self._bytes_put = 0  # by threads that put, under the lock; the next by the one that sends
        self._bytes_gone = 0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether none waits."""
        return not self._commands

    def put(self, command: Command) -> None:
        """Append. Raises BadInput for a command above the size limit, EngineDead when too many wait."""
        data = encode(command)
        if len(data) > MAX_COMMAND_BYTES:
            raise BadInput(f"a command of {len(data)} bytes is not accepted: at most {MAX_COMMAND_BYTES}")
        with self._lock:
            num_bytes = self._bytes_put - self._bytes_gone
            if len(self._commands) >= MAX_WAITING or (num_bytes and num_bytes + len(data) > MAX_WAITING_BYTES):
                raise EngineDead(
                    f"{NO_ENGINE}: {len(self._commands)} commands with {num_bytes} bytes are queued already"
                )
            self._bytes_put += len(data)
            self._commands.append((time.monotonic_ns(), command, data))

    def send_all(self, send: Callable[[bytes], bool], sent: Callable[[Command], None] = lambda command: None) -> None:
        """Hand over from the oldest until `send` says that it takes no more; `sent` is told of each that left."""
        while self._commands and send(self._commands[0][2]):
            sent(self._pop())

    def expired(self, now_ns: int) -> list[Reply]:
        """Answers to the commands that waited too long; they are gone."""
        replies: list[Reply] = []
        while self._commands and now_ns - self._commands[0][0] > MAX_WAIT_NS:
            replies.append(refuse(self._pop(), NO_ENGINE))
        return replies

    def _pop(self) -> Command:
        _, command, data = self._commands.popleft()
        self._bytes_gone += len(data)
        return command


class AwaitedRequests:
    """Requests that have not ended, and what was heard of each: what a client tells after a reconnection.

    Fed with every command that left and every reply that came. Belongs to the reading thread.
    """

    def __init__(self) -> None:
        self._heard: dict[str, list[int]] = {}

    def sent(self, command: Command) -> None:
        """A command left."""
        if isinstance(command, Submit) and len(self._heard) < MAX_AWAITED:
            self._heard.setdefault(command.request_id, [])

    def heard(self, reply: Reply) -> None:
        """A reply came."""
        if isinstance(reply, Refused):
            if not self._heard.get(reply.request_id):  # else it is the second of two with one id that was refused
                self._heard.pop(reply.request_id, None)
        elif isinstance(reply, Accepted):
            if reply.request_id in self._heard:
                self._heard[reply.request_id] = [0] * len(reply.numbers)
        elif isinstance(reply, Tokens | Finished):
            self._count(reply)

    @property
    def ids(self) -> list[str]:
        """Of all of them."""
        return list(self._heard)

    def all(self) -> tuple[Awaited, ...]:
        """What to tell."""
        return tuple(Awaited(request_id=name, heard=tuple(counts)) for name, counts in self._heard.items())

    def _count(self, reply: Tokens | Finished) -> None:
        counts = self._heard.get(reply.request_id)
        if counts is None or not 0 <= reply.index < max(1, len(counts)):
            return
        if not counts:  # the end of one that the engine never accepted
            del self._heard[reply.request_id]
        elif isinstance(reply, Tokens):
            counts[reply.index] += 1
        else:
            counts[reply.index] = ENDED
            if all(count == ENDED for count in counts):
                del self._heard[reply.request_id]

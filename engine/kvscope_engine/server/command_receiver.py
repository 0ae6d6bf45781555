"""Receives commands: answers some immediately on the I/O thread, and queues the others for the engine's thread.

Owns the engine's phase and the queue of tasks for the engine's thread. While there is no engine, commands that need it
are refused with the reason.

The queue is bounded in number and bytes. Clients are served round-robin, so a client that sends thousands of commands
delays only itself; each client's commands remain in order. A client that acts for several others, such as the HTTP API,
names them (`OnBehalfOf`). They are served round-robin within that client's turn, and each has its own bounds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvscope_engine.server.client_interventions import HeartbeatFacts, PausingClients
from kvscope_engine.server.fair_queue import FairQueue
from kvscope_engine.server.preparation import Prepared
from kvscope_engine.server.prompt_estimates import PreparedEstimate
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_engine.server.service_limits import Allowance, ServiceLimits, refusal_text
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    Abort,
    Awaited,
    BlockContent,
    BlockText,
    Command,
    Control,
    Done,
    EstimatePrompt,
    GetAllocatorMap,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    Reply,
    Status,
    Submit,
    refuse,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Hello, Progress
from kvscope_telemetry.transport.server_sockets import ServerSockets

SMALL_JOIN_BYTES: Final = 64 << 10
"""Maximum bytes of a `ClientJoined` task that is queued regardless of the bounds, if its client has no other task."""
SLICE_BLOCKS: Final = 32
"""Number of blocks whose contents are read per task, so that a query for thousands of blocks does not delay
other clients.
"""

_Task = TypeVar("_Task")


class OnBehalfOf(NamedTuple):
    """Client for which another client sends a command, and the batch of the command.

    Both are empty if the sender acts for itself.
    """

    client: str = ""
    batch: str = ""


CLIENT_ITSELF: Final = OnBehalfOf()


class CommandReceiver:
    """Receives commands in every phase of the engine.

    `stop` is called when a client requests a shutdown before the engine is ready.
    """

    def __init__(self, stop: Callable[[], None], limits: ServiceLimits | None = None) -> None:
        self.tasks: CommandQueue[Task] = CommandQueue(limits or ServiceLimits())
        self.telemetry_endpoint = ""
        self.pausing_clients = PausingClients()
        self.facts = HeartbeatFacts()
        """Data for heartbeats. Replaced by the engine's thread; may be read on any thread."""
        self.wants_ticks = False
        """Whether the engine's thread needs a `Tick` with the next heartbeat even if it has no other task."""
        self.busy_since_ns = 0
        """Monotonic time at which the engine's thread began its current task or step; 0 while it waits."""
        self.phase: Literal["loading", "ready", "failed"] = "loading"
        self.progress: Progress | None = None
        self.hello: Hello | None = None
        self.reason = ""
        self.has_received_commands = False
        self._stop = stop
        self._sockets: ServerSockets | None = None
        self._has_sockets = threading.Event()

    def serve(self, sockets: ServerSockets) -> None:
        """Start answering over `sockets`. Calls of `receive` block until then."""
        self.telemetry_endpoint = sockets.telemetry_endpoint
        self._sockets = sockets
        self._has_sockets.set()

    # Called on the I/O thread.

    def receive(self, client: bytes, command: Command) -> None:
        self._has_sockets.wait()
        sockets = self._sockets
        assert sockets is not None, "set before the event"
        caller = sockets.caller(client)
        reply = self.answer(client, command)
        if isinstance(reply, Status) and caller is not None:
            since_ns = self.busy_since_ns
            busy_s = (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0
            reply = msgspec.structs.replace(reply, role=caller.role, name=caller.name, busy_s=busy_s)
        if reply is not None:
            sockets.reply(client, reply)
        if isinstance(command, GetStatus) and command.session and caller is not None and caller.role is Role.OPERATOR:
            refusal = self.enqueue_join(client, command, caller.public_key)
            if refusal is not None:
                sockets.reply(client, refusal)

    def answer(self, client: bytes, command: Command) -> Reply | None:
        self.has_received_commands = True
        self.pausing_clients.renew(client)
        if isinstance(command, GetStatus):
            return self.status(command.tag)
        if self.phase != "ready":
            return self._without_engine(command)
        on_behalf_of = (
            OnBehalfOf(command.client, command.batch) if isinstance(command, Submit | Abort) else CLIENT_ITSELF
        )
        reason = self.tasks.append(client, command, command_bytes(command), on_behalf_of)
        return refuse(command, refusal_text(reason), is_temporary=True) if reason else None

    def enqueue_join(self, client: bytes, command: GetStatus, owner: str) -> Reply | None:
        """Queue the introduction of a client's session, in order with the client's commands.

        Returns a refusal if the queue is full, else None.
        """
        num_bytes = command_bytes(command)
        if num_bytes <= SMALL_JOIN_BYTES and not self.tasks.has(client):
            num_bytes = 0
        reason = self.tasks.append(client, ClientJoined(command.session, owner, command.awaited), num_bytes)
        return refuse(command, refusal_text(reason)) if reason else None

    def report_lost(self, client: bytes) -> None:
        self.tasks.prepend(client, ClientLost())

    def tick(self) -> None:
        self.tasks.append(b"", Tick())

    # Called on the engine's thread.

    def refuse_lost(self, client: bytes, *, may_return: bool) -> list[Reply]:
        """Drop the queued commands of a lost client, or only its queries if it may return. Returns refusals of
        the dropped commands.
        """

        def is_dropped(task: Task) -> bool:
            return is_query(task) if may_return else command_of(task) is not None

        dropped = (command_of(task) for task in self.tasks.remove_if(client, is_dropped))
        return [refuse(command, "the client does not read its answers") for command in dropped if command is not None]

    def move(self, previous: bytes, client: bytes) -> None:
        self.tasks.remove_if(previous, lambda task: isinstance(task, ClientLost))  # it concerns the previous connection
        self.tasks.move(previous, client)

    def submits_of(self, client: bytes) -> set[str]:
        return {task.request_id for task in self.tasks.tasks_of(client) if isinstance(task, Submit)}

    def remove_submits(self, client: bytes, request_id: str) -> list[Submit]:
        """Remove and return the client's queued submissions with this id, for an abort that is served before them."""
        removed = self.tasks.remove_if(client, lambda task: isinstance(task, Submit) and task.request_id == request_id)
        return [task for task in removed if isinstance(task, Submit)]

    def refuse_waiting(self) -> list[tuple[bytes, Reply]]:
        """Remove all queued tasks. Returns refusals of their commands, by client."""
        replies: list[tuple[bytes, Reply]] = []
        while (waiting := self.tasks.next(wait=False)) is not None:
            client, task = waiting
            command = command_of(task)
            if command is not None:
                replies.append((client, self._without_engine(command)))
        return replies

    def ready(self, hello: Hello) -> None:
        self.hello = hello
        self.phase = "ready"

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.phase = "failed"

    # Called on any thread.

    def enqueue_prepared(self, client: bytes, prepared: Prepared) -> None:
        self.tasks.append(client, prepared, on_behalf_of=OnBehalfOf(prepared.submit.client, prepared.submit.batch))

    def name_of(self, client: bytes) -> str:
        """Return the client's display name; "a client" if it is unknown."""
        caller = self._sockets.caller(client) if self._sockets is not None else None
        return caller.name if caller is not None else "a client"

    def status(self, tag: int) -> Status:
        return Status(
            phase=self.phase,
            telemetry_endpoint=self.telemetry_endpoint,
            progress=self.progress,
            hello=self.hello,
            reason=self.reason,
            paused=self.pausing_clients.is_paused,
            paused_by=self.pausing_clients.names,
            paused_s=self.pausing_clients.paused_s,
            tag=tag,
            intervenes=True,
            adapters=self.facts.adapters,
            takes_adapters=self.facts.takes_adapters,
        )

    def _without_engine(self, command: Command) -> Reply:
        if isinstance(command, Abort):
            return Done(request_id=command.request_id)
        if isinstance(command, Control) and command.action == "shutdown":
            self._stop()
            return Done(tag=command.tag)
        if self.phase == "failed":
            return refuse(command, f"the engine has ended: {self.reason}")
        reason = "the model is still loading: try again when the engine is ready"
        return refuse(command, reason, is_temporary=True)


class ClientLost:
    """Task: a client disconnected, or no longer reads its messages."""


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """Task: a client introduced its session, possibly on another connection than before."""

    session: str
    owner: str
    awaited: tuple[Awaited, ...]


class Tick:
    """Task: check leases and sessions for expiry."""


class BlockTextQuery:
    """Task: a query for the contents of blocks, with the contents read so far.

    The blocks are read `SLICE_BLOCKS` at a time; steps that run in between may change them.
    """

    def __init__(self, command: GetBlockText) -> None:
        self.command = command
        self._contents: list[BlockContent] = []

    def advance(self, engine: ServedEngine) -> BlockText | None:
        """Read the next `SLICE_BLOCKS` blocks. Returns the reply after the last blocks, else None."""
        start = len(self._contents)
        self._contents += engine.block_text(self.command.blocks[start : start + SLICE_BLOCKS])
        if len(self._contents) < len(self.command.blocks):
            return None
        return BlockText(contents=tuple(self._contents), tag=self.command.tag)


Task: TypeAlias = Command | Prepared | BlockTextQuery | ClientLost | ClientJoined | Tick
"""Unit of work for the engine's thread: a command, the remainder of a partly served command, or an event."""


def command_of(task: Task) -> Command | None:
    """Return the unanswered command of a task; None for events and submissions that are being prepared."""
    if isinstance(task, BlockTextQuery):
        return task.command
    return None if isinstance(task, Prepared | ClientLost | ClientJoined | Tick) else task


def is_query(task: Task) -> bool:
    """Whether the task only reads, so that its reply need not be sent if the client reconnects."""
    queries = EstimatePrompt | PreparedEstimate | GetSnapshot | GetBlockText | GetAllocatorMap | BlockTextQuery
    return isinstance(task, queries)


@dataclass(slots=True)
class _Waiting(Generic[_Task]):
    """Queued tasks of one client as (task, on behalf of, bytes). Tasks of the client itself precede those on
    behalf of others.
    """

    own: deque[tuple[_Task, str, int]] = field(default_factory=deque)
    others: FairQueue[tuple[_Task, str, int]] = field(default_factory=FairQueue)

    def __bool__(self) -> bool:
        return bool(self.own) or bool(self.others)

    def all(self) -> Iterable[tuple[_Task, str, int]]:
        return chain(self.own, self.others)

    def pop(self) -> tuple[_Task, str, int]:
        if self.own:
            return self.own.popleft()
        popped = self.others.pop()
        assert popped is not None, "a client of whom nothing waits is forgotten"
        return popped[1]


class CommandQueue(Generic[_Task]):
    """Fair queue of tasks by client. Any thread may append tasks, and one thread pops them. `stop` wakes that
    thread if it waits for a task.
    """

    def __init__(self, limits: ServiceLimits) -> None:
        self.is_stopped = False
        self._allowance = Allowance("commands wait", limits.client_commands, limits.all_commands)
        self._clients: OrderedDict[bytes, _Waiting[_Task]] = OrderedDict()
        self._lock = threading.Lock()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        """Wakes the popping thread. Unlike a condition, a SimpleQueue may be used in a signal handler on that
        thread.
        """

    def append(self, client: bytes, task: _Task, num_bytes: int = 0, on_behalf_of: OnBehalfOf = CLIENT_ITSELF) -> str:
        """Append a task to the client's queue. Returns the reason if a bound would be exceeded, else "".

        Tasks of 0 bytes are not bounded.
        """
        with self._lock:
            reason = self._allowance.acquire((client, on_behalf_of.client), num_bytes) if num_bytes else ""
            if reason:
                return reason
            was_empty = not self._clients
            waiting = self._clients.setdefault(client, _Waiting())
            entry = (task, on_behalf_of.client, num_bytes)
            if on_behalf_of == CLIENT_ITSELF:
                waiting.own.append(entry)
            else:
                waiting.others.append(on_behalf_of.client, on_behalf_of.batch, entry)
        if was_empty:
            self._wakeups.put(None)
        return ""

    def prepend(self, client: bytes, task: _Task) -> None:
        """Insert a task before the client's own tasks, without a bound. Thread-safe."""
        with self._lock:
            was_empty = not self._clients
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))
        if was_empty:
            self._wakeups.put(None)

    def requeue(self, client: bytes, task: _Task) -> None:
        """Insert the remainder of a task before all tasks that the client submitted for itself, for its next turn.

        Must be called on the thread that calls `next`. Unlike `prepend`, this method does not wake that thread.
        """
        with self._lock:
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))

    def next(self, *, wait: bool) -> tuple[bytes, _Task] | None:
        """Pop the oldest task of the next client. With `wait`, block until there is one or `stop` is called."""
        while True:
            while not self._wakeups.empty():
                self._wakeups.get()
            with self._lock:
                if self._clients:
                    return self._pop_first()
            if not wait or self.is_stopped:
                return None
            self._wakeups.get()

    @property
    def has_any(self) -> bool:
        with self._lock:
            return bool(self._clients)

    def has(self, client: bytes) -> bool:
        with self._lock:
            return client in self._clients

    def tasks_of(self, client: bytes) -> list[_Task]:
        """Return the client's tasks in order: the client's own tasks, then those on behalf of others."""
        with self._lock:
            waiting = self._clients.get(client)
            return [] if waiting is None else [task for task, _, _ in waiting.all()]

    def remove_if(self, client: bytes, is_wanted: Callable[[_Task], bool]) -> list[_Task]:
        """Remove and return the client's tasks that match, in the order of `tasks_of`. Other tasks remain in order."""
        with self._lock:
            waiting = self._clients.get(client)
            if waiting is None:
                return []
            removed = [entry for entry in waiting.own if is_wanted(entry[0])]
            waiting.own = deque(entry for entry in waiting.own if not is_wanted(entry[0]))
            removed += waiting.others.remove_if(lambda entry: is_wanted(entry[0]))
            for _, on_behalf_of, num_bytes in removed:
                self._release(client, on_behalf_of, num_bytes)
            if not waiting:
                del self._clients[client]
            return [task for task, _, _ in removed]

    def move(self, previous: bytes, client: bytes) -> None:
        """Move all tasks of the connection `previous` to `client`, ahead of the tasks that `client` has
        already. The moved tasks then count towards the bounds of `client`.
        """
        with self._lock:
            earlier = self._clients.pop(previous, None)
            if earlier is None:
                return
            for on_behalf_of in ("", *earlier.others.clients):
                self._allowance.move((previous, on_behalf_of), (client, on_behalf_of))
            later = self._clients.pop(client, None)
            if later is not None:
                earlier.own += later.own
                earlier.others.extend(later.others)
            self._clients[client] = earlier

    def stop(self) -> None:
        self.is_stopped = True
        self._wakeups.put(None)

    def _pop_first(self) -> tuple[bytes, _Task]:
        client, waiting = self._clients.popitem(last=False)
        task, on_behalf_of, num_bytes = waiting.pop()
        if waiting:
            self._clients[client] = waiting  # at the end: other clients are served first
        self._release(client, on_behalf_of, num_bytes)
        return client, task

    def _release(self, client: bytes, on_behalf_of: str, num_bytes: int) -> None:
        if num_bytes:
            self._allowance.release((client, on_behalf_of), num_bytes)

"""Commands as they come: what is answered on the I/O thread, at once, whatever the engine does, and what waits for it.

Owns the engine's phase and the queue of tasks for the engine's thread. Commands that need the engine go into that
queue; while there is no engine they are refused with the reason.

The queue is bounded in number and bytes, and clients take turns. Whoever sends thousands of commands waits for them
itself: every other client's next one is served after one of its. The order of each client's own is kept. A client that
asks for several others, as the HTTP API does, says for whom (`Whose`): those take turns within its own, and are bounded
each.
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

from kvscope_engine.server.client_interventions import HeartbeatFacts, Pauses
from kvscope_engine.server.limits import Allowance, ServiceLimits, behind
from kvscope_engine.server.preparation import Prepared
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_engine.server.turns import Turns
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    Abort,
    Awaited,
    BlockContent,
    BlockText,
    Command,
    Control,
    Done,
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
from kvscope_telemetry.sockets.server_sockets import ServerSockets

SMALL_JOIN_BYTES: Final = 64 << 10
"""An introduction up to this, of a client of which nothing waits, is taken however much waits of the others."""
SLICE_BLOCKS: Final = 32
"""Whose contents are read at a time, so that a question for four thousand blocks holds up nobody."""

_Task = TypeVar("_Task")


class Whose(NamedTuple):
    """For whom a command is sent, and what it belongs to; both empty: the client's own."""

    client: str = ""
    batch: str = ""


OWN: Final = Whose()


class CommandReceiver:
    """Knows the phase. `stop` is called when a client asks for a shutdown while the model loads."""

    def __init__(self, stop: Callable[[], None], limits: ServiceLimits | None = None) -> None:
        self.tasks: CommandQueue[Task] = CommandQueue(limits or ServiceLimits())
        """What waits for the engine's thread."""
        self.telemetry_endpoint = ""
        self.pauses = Pauses()
        self.facts = HeartbeatFacts()
        """The engine's thread sets another, any may read it."""
        self.wants_ticks = False
        """Whether the engine's thread is to be woken now and then though there is nothing else to do."""
        self.busy_since_ns = 0
        """When the engine's thread began what it does; 0 while it waits."""
        self.phase: Literal["loading", "ready", "failed"] = "loading"
        self.progress: Progress | None = None
        self.hello: Hello | None = None
        self.reason = ""
        self.was_asked = False
        """Whether anybody ever sent a command."""
        self._stop = stop
        self._sockets: ServerSockets | None = None
        self._has_sockets = threading.Event()

    def serve(self, sockets: ServerSockets) -> None:
        """From now on `receive` answers over `sockets`; what came earlier waits for this."""
        self.telemetry_endpoint = sockets.telemetry_endpoint
        self._sockets = sockets
        self._has_sockets.set()

    # On the I/O thread.

    def receive(self, client: bytes, command: Command) -> None:
        """A command came that its client may give."""
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
            refusal = self.join(client, command, caller.public_key)
            if refusal is not None:
                sockets.reply(client, refusal)

    def answer(self, client: bytes, command: Command) -> Reply | None:
        """The answer that can be given at once, None when the engine's thread gives it."""
        self.was_asked = True
        self.pauses.renew(client)
        if isinstance(command, GetStatus):
            return self.status(command.tag)
        if self.phase != "ready":
            return self._without_engine(command)
        whose = Whose(command.client, command.batch) if isinstance(command, Submit | Abort) else OWN
        reason = self.tasks.put(client, command, command_bytes(command), whose)
        return refuse(command, behind(reason)) if reason else None

    def join(self, client: bytes, command: GetStatus, owner: str) -> Reply | None:
        """Queue an introduction in the order of the client's commands; the refusal when that is too much."""
        num_bytes = command_bytes(command)
        if num_bytes <= SMALL_JOIN_BYTES and not self.tasks.has(client):
            num_bytes = 0
        reason = self.tasks.put(client, ClientJoined(command.session, owner, command.awaited), num_bytes)
        return refuse(command, behind(reason)) if reason else None

    def lose(self, client: bytes) -> None:
        """A client is gone or does not read: the engine's thread hears of it before its other commands."""
        self.tasks.put_first(client, ClientLost())

    def tick(self) -> None:
        """Have the engine's thread look at the clock."""
        self.tasks.put(b"", Tick())

    # On the engine's thread.

    def refuse_lost(self, client: bytes, *, may_return: bool) -> list[Reply]:
        """What a lost client asked for is not done; of one that may come back only its questions are dropped."""

        def is_dropped(task: Task) -> bool:
            return is_question(task) if may_return else command_of(task) is not None

        dropped = (command_of(task) for task in self.tasks.take_if(client, is_dropped))
        return [refuse(command, "the client does not read its answers") for command in dropped if command is not None]

    def move(self, before: bytes, client: bytes) -> None:
        """A client has another connection now: what it asked for on the one before comes first."""
        self.tasks.take_if(before, lambda task: isinstance(task, ClientLost))  # that connection's, not this one's
        self.tasks.move(before, client)

    def submits_of(self, client: bytes) -> set[str]:
        """Ids of the client's submissions that wait to be served."""
        return {task.request_id for task in self.tasks.of(client) if isinstance(task, Submit)}

    def withdraw(self, client: bytes, request_id: str) -> list[Submit]:
        """Take back the client's submission of this id that waits: its abort came first, for it waits for no turn."""
        taken = self.tasks.take_if(client, lambda task: isinstance(task, Submit) and task.request_id == request_id)
        return [task for task in taken if isinstance(task, Submit)]

    def refuse_waiting(self) -> list[tuple[bytes, Reply]]:
        """Negative answers to every command that waits, for when nobody is left to serve them."""
        replies: list[tuple[bytes, Reply]] = []
        while (waiting := self.tasks.next(wait=False)) is not None:
            client, task = waiting
            command = command_of(task)
            if command is not None:
                replies.append((client, self._without_engine(command)))
        return replies

    def ready(self, hello: Hello) -> None:
        """There is an engine now."""
        self.hello = hello
        self.phase = "ready"

    def fail(self, reason: str) -> None:
        """There is no engine, or no longer one."""
        self.reason = reason
        self.phase = "failed"

    # On any thread.

    def put_prepared(self, client: bytes, prepared: Prepared) -> None:
        """A submission's prompt is made into tokens."""
        self.tasks.put(client, prepared, whose=Whose(prepared.submit.client, prepared.submit.batch))

    def name_of(self, client: bytes) -> str:
        """What a client is called, for people."""
        caller = self._sockets.caller(client) if self._sockets is not None else None
        return caller.name if caller is not None else "somebody"

    def status(self, tag: int) -> Status:
        """How the engine is."""
        return Status(
            phase=self.phase,
            telemetry_endpoint=self.telemetry_endpoint,
            progress=self.progress,
            hello=self.hello,
            reason=self.reason,
            paused=self.pauses.any,
            paused_by=self.pauses.names,
            paused_s=self.pauses.paused_s,
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
        return refuse(command, "the model is still loading: try again when the engine is ready")


class ClientLost:
    """A client is gone, or does not read."""


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """A client introduced itself, perhaps on another connection than before."""

    session: str
    owner: str
    awaited: tuple[Awaited, ...]


class Tick:
    """Time went by."""


class BlockTextQuery:
    """A question for what blocks hold, and what was found so far. Each is told as it was when its slice was read."""

    def __init__(self, command: GetBlockText) -> None:
        self.command = command
        self._contents: list[BlockContent] = []

    def advance(self, engine: ServedEngine) -> BlockText | None:
        """Read a slice; the answer when it was the last."""
        start = len(self._contents)
        self._contents += engine.block_text(self.command.blocks[start : start + SLICE_BLOCKS])
        if len(self._contents) < len(self.command.blocks):
            return None
        return BlockText(contents=tuple(self._contents), tag=self.command.tag)


Task: TypeAlias = Command | Prepared | BlockTextQuery | ClientLost | ClientJoined | Tick
"""What the engine's thread is given to do: commands, what is left of them, and what it needs to know."""


def command_of(task: Task) -> Command | None:
    """The command behind a task that is still to be answered."""
    if isinstance(task, BlockTextQuery):
        return task.command
    return None if isinstance(task, Prepared | ClientLost | ClientJoined | Tick) else task


def is_question(task: Task) -> bool:
    """Whether it only asks: its answer is for the connection that it came on, and changes nothing."""
    return isinstance(task, GetSnapshot | GetBlockText | GetAllocatorMap | BlockTextQuery)


@dataclass(slots=True)
class _Waiting(Generic[_Task]):
    """What waits of one client, each with for whom it is, and its bytes. Its own comes before what is for others."""

    own: deque[tuple[_Task, str, int]] = field(default_factory=deque)
    others: Turns[tuple[_Task, str, int]] = field(default_factory=Turns)

    def __bool__(self) -> bool:
        return bool(self.own) or bool(self.others)

    def all(self) -> Iterable[tuple[_Task, str, int]]:
        return chain(self.own, self.others)

    def pop(self) -> tuple[_Task, str, int]:
        if self.own:
            return self.own.popleft()
        found = self.others.pop()
        assert found is not None, "a client of whom nothing waits is forgotten"
        return found[1]


class CommandQueue(Generic[_Task]):
    """Work by client. Any thread puts, one thread takes; `stop` ends every wait, now and later."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.is_stopped = False
        self._allowance = Allowance("commands wait", limits.client_commands, limits.all_commands)
        self._clients: OrderedDict[bytes, _Waiting[_Task]] = OrderedDict()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung when there is something to look for; unlike a condition, also by a signal handler of whoever waits."""

    def put(self, client: bytes, task: _Task, num_bytes: int = 0, whose: Whose = OWN) -> str:
        """Append to the client's queue; the reason when that is too much. With 0 bytes it is always taken."""
        with self._lock:
            reason = self._allowance.take((client, whose.client), num_bytes) if num_bytes else ""
            if reason:
                return reason
            was_empty = not self._clients
            waiting = self._clients.setdefault(client, _Waiting())
            entry = (task, whose.client, num_bytes)
            if whose == OWN:
                waiting.own.append(entry)
            else:
                waiting.others.put(whose.client, whose.batch, entry)
        if was_empty:
            self._bell.put(None)
        return ""

    def put_first(self, client: bytes, task: _Task) -> None:
        """Before all else of that client; always taken. From any thread."""
        with self._lock:
            was_empty = not self._clients
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))
        if was_empty:
            self._bell.put(None)

    def put_back(self, client: bytes, task: _Task) -> None:
        """What is left of a task goes on when the client's turn comes again, before all else of that client."""
        with self._lock:
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))

    def next(self, *, wait: bool) -> tuple[bytes, _Task] | None:
        """The next client's oldest; with `wait`, sleeps until there is one, or it is time to stop."""
        while True:
            while not self._bell.empty():
                self._bell.get()
            with self._lock:
                if self._clients:
                    return self._pop_first()
            if not wait or self.is_stopped:
                return None
            self._bell.get()

    @property
    def has_any(self) -> bool:
        """Whether anything of anybody waits."""
        with self._lock:
            return bool(self._clients)

    def has(self, client: bytes) -> bool:
        """Whether anything of the client waits."""
        with self._lock:
            return client in self._clients

    def of(self, client: bytes) -> list[_Task]:
        """What waits of one client, the oldest of each of its lines first."""
        with self._lock:
            waiting = self._clients.get(client)
            return [] if waiting is None else [task for task, _, _ in waiting.all()]

    def take_if(self, client: bytes, is_wanted: Callable[[_Task], bool]) -> list[_Task]:
        """Take out what is wanted of one client, in the order of `of`; the rest keeps its place."""
        with self._lock:
            waiting = self._clients.get(client)
            if waiting is None:
                return []
            taken = [entry for entry in waiting.own if is_wanted(entry[0])]
            waiting.own = deque(entry for entry in waiting.own if not is_wanted(entry[0]))
            taken += waiting.others.take_if(lambda entry: is_wanted(entry[0]))
            for _, whose, num_bytes in taken:
                self._give(client, whose, num_bytes)
            if not waiting:
                del self._clients[client]
            return [task for task, _, _ in taken]

    def move(self, before: bytes, client: bytes) -> None:
        """Everything of `before` is `client`'s from now on, and comes before what that has."""
        with self._lock:
            earlier = self._clients.pop(before, None)
            if earlier is None:
                return
            for whose in ("", *earlier.others.clients):
                self._allowance.move((before, whose), (client, whose))
            later = self._clients.pop(client, None)
            if later is not None:
                earlier.own += later.own
                earlier.others.join(later.others)
            self._clients[client] = earlier

    def stop(self) -> None:
        """Nobody waits any more."""
        self.is_stopped = True
        self._bell.put(None)

    def _pop_first(self) -> tuple[bytes, _Task]:
        client, waiting = self._clients.popitem(last=False)
        task, whose, num_bytes = waiting.pop()
        if waiting:
            self._clients[client] = waiting  # at the end: the others come first
        self._give(client, whose, num_bytes)
        return client, task

    def _give(self, client: bytes, whose: str, num_bytes: int) -> None:
        if num_bytes:
            self._allowance.give((client, whose), num_bytes)

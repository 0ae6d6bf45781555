"""Commands as they come: what is answered on the I/O thread, at once, whatever the engine does, and what waits for it.

Owns the engine's phase and the queue of tasks for the engine's thread. Commands that need the engine go into that
queue; while there is no engine they are refused with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from kvscope_engine.server.command_queue import OWN, CommandQueue, Whose
from kvscope_engine.server.interventions import HeartbeatFacts, Pauses
from kvscope_engine.server.limits import ServiceLimits, behind
from kvscope_engine.server.preparation import Prepared
from kvscope_engine.server.served_engine import ServedEngine
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


class CommandReceiver:
    """Knows the phase. `stop` is called when a client asks for a shutdown while the model loads."""

    def __init__(self, stop: Callable[[], None], limits: ServiceLimits | None = None) -> None:
        self.tasks: CommandQueue[Task] = CommandQueue(limits or ServiceLimits())
        """What waits for the engine's thread."""
        self.telemetry_endpoint = ""
        self.pauses = Pauses()
        self.told = HeartbeatFacts()
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
        reply = self.take(client, command)
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

    def take(self, client: bytes, command: Command) -> Reply | None:
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

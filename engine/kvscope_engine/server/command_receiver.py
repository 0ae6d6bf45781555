"""Commands: what is answered on the I/O thread, at once, whatever the engine is doing.

Owns the engine's phase and the queue of commands for the engine's thread. Commands that need the engine go
into that queue; while there is no engine they are refused with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvscope_engine.server.allowance import behind
from kvscope_engine.server.block_texts import BlockTextQuery
from kvscope_engine.server.command_queue import OWN, CommandQueue, Whose
from kvscope_engine.server.limits import ServiceLimits
from kvscope_engine.server.preparation import Prepared
from kvscope_engine.server.tasks import ClientJoined, ClientLost, ReceivedCommand, Tick, Work, command_of, is_question
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    Abort,
    Command,
    Control,
    Done,
    GetStatus,
    Reply,
    Status,
    Submit,
    refuse,
)
from kvscope_telemetry.messages.telemetry import Hello, Progress

SMALL_JOIN_BYTES: Final = 64 << 10
"""An introduction up to this, of a client of which nothing waits, is taken however much waits of the others."""


@dataclass(frozen=True, slots=True)
class HeartbeatFacts:
    """What everybody is told with each heartbeat, as in `Heartbeat`."""

    pinned: bytes = b""
    pinned_by: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


class CommandReceiver:
    """Knows the phase. `stop` is called when a client asks for a shutdown while the model loads."""

    def __init__(self, stop: Callable[[], None], limits: ServiceLimits | None = None) -> None:
        self.telemetry_endpoint = ""
        self.pauses = Pauses()
        self.told = HeartbeatFacts()
        """The engine's thread sets another, any may read it."""
        self.wants_ticks = False
        """Whether the engine's thread is to be woken now and then though there is nothing else to do."""
        self.phase: Literal["loading", "ready", "failed"] = "loading"
        self.progress: Progress | None = None
        self.hello: Hello | None = None
        self.reason = ""
        self.was_asked = False
        """Whether anybody ever sent a command."""
        self._stop = stop
        self._waiting: CommandQueue[Work] = CommandQueue(limits or ServiceLimits())

    # On the I/O thread.

    def take(self, client: bytes, command: Command) -> Reply | None:
        """The answer that can be given at once, None when the engine's thread gives it."""
        self.was_asked = True
        self.pauses.renew(client)
        if isinstance(command, GetStatus):
            return self.status(command.tag)
        if self.phase != "ready":
            return self._without_engine(command)
        whose = Whose(command.client, command.batch) if isinstance(command, Submit | Abort) else OWN
        reason = self._waiting.put(client, command, command_bytes(command), whose)
        return refuse(command, behind(reason)) if reason else None

    def join(self, client: bytes, command: GetStatus, owner: str) -> Reply | None:
        """Queue an introduction in the order of the client's commands; the refusal when that is too much."""
        num_bytes = command_bytes(command)
        if num_bytes <= SMALL_JOIN_BYTES and not self._waiting.has(client):
            num_bytes = 0
        reason = self._waiting.put(client, ClientJoined(command.session, owner, command.awaited), num_bytes)
        return refuse(command, behind(reason)) if reason else None

    def lose(self, client: bytes) -> None:
        """A client is gone or does not read: the engine's thread hears of it before its other commands."""
        self._waiting.put_first(client, ClientLost())

    def tick(self) -> None:
        """Have the engine's thread look at the clock."""
        self._waiting.put(b"", Tick())

    # On the engine's thread.

    def put_back(self, client: bytes, rest: BlockTextQuery) -> None:
        """Go on with the rest when the others had their turn."""
        self._waiting.put_back(client, rest)

    def refuse_lost(self, client: bytes, *, may_return: bool) -> list[Reply]:
        """What a lost client asked for is not done; of one that may come back only its questions are dropped."""

        def is_dropped(work: Work) -> bool:
            return is_question(work) if may_return else command_of(work) is not None

        dropped = (command_of(work) for work in self._waiting.take_if(client, is_dropped))
        return [refuse(command, "the client does not read its answers") for command in dropped if command is not None]

    def move(self, before: bytes, client: bytes) -> None:
        """A client has another connection now: what it asked for on the one before comes first."""
        self._waiting.take_if(before, lambda work: isinstance(work, ClientLost))  # that connection's, not this one's
        self._waiting.move(before, client)

    def submits_of(self, client: bytes) -> set[str]:
        """Ids of the client's submissions that wait to be served."""
        return {work.request_id for work in self._waiting.of(client) if isinstance(work, Submit)}

    def withdraw(self, client: bytes, request_id: str) -> list[Submit]:
        """Take back the client's submission of this id that waits: its abort came first, for it waits for no turn."""
        taken = self._waiting.take_if(client, lambda work: isinstance(work, Submit) and work.request_id == request_id)
        return [work for work in taken if isinstance(work, Submit)]

    def next_command(self, *, wait: bool) -> ReceivedCommand | None:
        """The next client's oldest task; with `wait`, sleeps until there is one, or it is time to stop."""
        return self._waiting.next(wait=wait)

    def refuse_waiting(self) -> list[tuple[bytes, Reply]]:
        """Negative answers to every command that waits, for when nobody is left to serve them."""
        replies: list[tuple[bytes, Reply]] = []
        while (task := self.next_command(wait=False)) is not None:
            client, work = task
            command = command_of(work)
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
        self._waiting.put(client, prepared, whose=Whose(prepared.submit.client, prepared.submit.batch))

    def end(self) -> None:
        """It is time to stop, whatever waits. From a signal handler too."""
        self._waiting.stop()

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._waiting.is_stopped

    @property
    def paused(self) -> bool:
        """Whether somebody holds the engine's steps."""
        return self.pauses.any

    def status(self, tag: int) -> Status:
        """How the engine is."""
        return Status(
            phase=self.phase,
            telemetry_endpoint=self.telemetry_endpoint,
            progress=self.progress,
            hello=self.hello,
            reason=self.reason,
            paused=self.paused,
            paused_by=self.pauses.names,
            paused_s=self.pauses.held_s,
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


@dataclass(slots=True)
class _Pause:
    name: str
    lease_ns: int
    """0: as long as the connection."""
    heard_ns: int


class Pauses:
    """Who holds the engine's steps. A pause lasts as long as whoever asked for it.

    Owns the holders and their leases. Knows neither sockets nor the engine. `renew` is called on the I/O thread,
    everything else on the engine's; `names` and `held_s` may be read from any.

    The engine stands still while there is any holder.
    """

    def __init__(self) -> None:
        self.names = ""
        """Of all holders, for people; empty when nobody holds."""
        self._pauses: dict[bytes, _Pause] = {}
        self._since_ns = 0
        """When the first of those who hold began."""

    @property
    def any(self) -> bool:
        """Whether somebody holds the steps."""
        return bool(self._pauses)

    @property
    def held_s(self) -> float:
        """How long the engine has stood still; from any thread."""
        since_ns = self._since_ns
        return (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0

    @property
    def holders(self) -> list[bytes]:
        """The clients that do."""
        return list(self._pauses)

    def pause(self, client: bytes, name: str, lease_s: float) -> None:
        """Stop from now on, for this client."""
        self._pauses[client] = _Pause(name, int(lease_s * 1e9), time.monotonic_ns())
        self._tell()

    def renew(self, client: bytes) -> None:
        """Something was heard of a client."""
        pause = self._pauses.get(client)
        if pause is not None:
            pause.heard_ns = time.monotonic_ns()

    def release(self, client: bytes) -> None:
        """A client is gone; does nothing for one that holds nothing."""
        self._pauses.pop(client, None)
        self._tell()

    def release_all(self) -> None:
        """Somebody lets the engine go on."""
        self._pauses.clear()
        self._tell()

    def expire(self) -> None:
        """End the pauses of those that were not heard of for their lease."""
        now_ns = time.monotonic_ns()
        for client, pause in list(self._pauses.items()):
            if pause.lease_ns and now_ns - pause.heard_ns > pause.lease_ns:
                del self._pauses[client]
        self._tell()

    def _tell(self) -> None:
        self._since_ns = (self._since_ns or time.monotonic_ns()) if self._pauses else 0
        self.names = ", ".join(dict.fromkeys(pause.name for pause in self._pauses.values()))

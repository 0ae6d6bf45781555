"""The front desk: what is answered on the I/O thread, at once, whatever the engine is doing.

Owns the engine's phase and the queue of commands for the engine's thread. Commands that need the engine go
into that queue; while there is no engine they are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from kvscope_engine.server.block_texts import BlockTextErrand
from kvscope_engine.server.command_queue import CommandQueue
from kvscope_engine.server.limits import ServiceLimits
from kvscope_engine.server.preparation import Prepared
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    Abort,
    Command,
    Control,
    Done,
    Failed,
    GetStatus,
    Refused,
    Reply,
    Status,
    Submit,
)
from kvscope_telemetry.messages.telemetry import Hello, Progress


class Lost:
    """Tells the engine's thread that a client is gone, or does not read."""


Work: TypeAlias = Command | Prepared | BlockTextErrand | Lost
"""What the engine's thread does for a client: a command, what is left of one, or what it needs to know."""
DeskCommand: TypeAlias = tuple[bytes, Work]
"""A client and what it wants."""


class CommandDesk:
    """Knows the phase. `stop` is called when a client asks for a shutdown while the model loads."""

    def __init__(self, stop: Callable[[], None], limits: ServiceLimits | None = None) -> None:
        self.telemetry_endpoint = ""
        self.paused = False
        self.phase: Literal["loading", "ready", "failed"] = "loading"
        self.progress: Progress | None = None
        self.hello: Hello | None = None
        self.reason = ""
        self.was_asked = False
        """Whether anybody ever sent a command."""
        self._stop = stop
        self._waiting: CommandQueue[Work] = CommandQueue(limits or ServiceLimits())

    def take(self, client: bytes, command: Command) -> Reply | None:
        """The answer that can be given at once, None when the engine's thread gives it."""
        self.was_asked = True
        if isinstance(command, GetStatus):
            return self._status(command.tag)
        if self.phase != "ready":
            return self._without_engine(command)
        reason = self._waiting.put(client, command, command_bytes(command))
        return refuse(command, f"the engine is behind: {reason}") if reason else None

    def put(self, client: bytes, work: Prepared | Lost) -> None:
        """Queue something that is not a client's command."""
        self._waiting.put(client, work)

    def put_back(self, client: bytes, rest: BlockTextErrand) -> None:
        """Go on with the rest when the others had their turn."""
        self._waiting.put_back(client, rest)

    def lose(self, client: bytes) -> list[Reply]:
        """A client is gone or does not read: what it asked for is not done, and the engine's thread is told."""
        refusals = [refuse(work, "you do not read your answers") for work in self._commands_of(client)]
        self._waiting.put(client, Lost())
        return refusals

    def end(self) -> None:
        """It is time to stop, whatever waits. From any thread, and from a signal handler."""
        self._waiting.stop()

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._waiting.is_stopped

    def ready(self, hello: Hello) -> None:
        """There is an engine now."""
        self.hello = hello
        self.phase = "ready"

    def fail(self, reason: str) -> None:
        """There is no engine, or no longer one."""
        self.reason = reason
        self.phase = "failed"

    def next_command(self, *, wait: bool) -> DeskCommand | None:
        """The next client's oldest errand; with `wait`, sleeps until there is one, or it is time to stop."""
        return self._waiting.next(wait=wait)

    def refuse_waiting(self) -> list[tuple[bytes, Reply]]:
        """Negative answers to every command that waits, for when nobody is left to serve them."""
        replies: list[tuple[bytes, Reply]] = []
        while (errand := self.next_command(wait=False)) is not None:
            client, work = errand
            command = _command_of(work)
            if command is not None:
                replies.append((client, self._without_engine(command)))
        return replies

    def _commands_of(self, client: bytes) -> list[Command]:
        waiting = (_command_of(work) for work in self._waiting.take_all(client))
        return [command for command in waiting if command is not None]

    def _status(self, tag: int) -> Status:
        return Status(
            phase=self.phase,
            telemetry_endpoint=self.telemetry_endpoint,
            progress=self.progress,
            hello=self.hello,
            reason=self.reason,
            paused=self.paused,
            tag=tag,
        )

    def _without_engine(self, command: Command) -> Reply:
        if isinstance(command, Abort):
            return Done(request_id=command.request_id)
        if isinstance(command, Control) and command.action == "shutdown":
            self._stop()
            return Done(tag=command.tag)
        if self.phase == "failed":
            return refuse(command, f"the engine has ended: {self.reason}")
        return refuse(command, "the model is still loading: try again when the status says ready")


def refuse(command: Command, reason: str) -> Reply:
    """The negative answer that fits the command."""
    if isinstance(command, Submit):
        return Refused(request_id=command.request_id, reason=reason)
    return Failed(reason=reason, tag=getattr(command, "tag", 0))


def _command_of(work: Work) -> Command | None:
    """The command behind a piece of work that is still to be answered."""
    if isinstance(work, BlockTextErrand):
        return work.command
    return None if isinstance(work, Prepared | Lost) else work

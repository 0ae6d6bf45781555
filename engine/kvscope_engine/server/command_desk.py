"""The front desk: what is answered on the I/O thread, at once, whatever the engine is doing.

Owns the engine's phase and the queue of commands for the engine's thread. Commands that need the engine go
into that queue; while there is no engine they are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeAlias

from kvscope_engine.server.pauses import Pauses
from kvscope_telemetry.messages.commands import (
    Abort,
    Awaited,
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

MAX_WAITING_COMMANDS: Final = 10_000
MAX_WAITING_CHARACTERS: Final = 64 << 20
"""Of prompts: a client that sends them faster than they are read is told so, and costs no more memory."""


class Stop:
    """Asks the engine's thread to end in an orderly way."""


class Lost:
    """Tells the engine's thread that a client is gone, or does not read."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Tells the engine's thread that a client introduced itself, perhaps on another connection than before."""

    session: str
    owner: str
    awaited: tuple[Awaited, ...]


class Tick:
    """Tells the engine's thread that time went by."""


DeskCommand: TypeAlias = tuple[bytes, Command | Lost | Stop | Joined | Tick]
"""A client and what it wants."""


class CommandDesk:
    """Knows the phase. `stop` is called when a client asks for a shutdown while the model loads."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.telemetry_endpoint = ""
        self.pauses = Pauses()
        self.wants_ticks = False
        """Whether the engine's thread is to be woken now and then though there is nothing else to do."""
        self.phase: Literal["loading", "ready", "failed"] = "loading"
        self.progress: Progress | None = None
        self.hello: Hello | None = None
        self.reason = ""
        self.was_asked = False
        """Whether anybody ever sent a command."""
        self._stop = stop
        self._errands: SimpleQueue[DeskCommand] = SimpleQueue()
        self._num_characters_in = 0  # written by the I/O thread alone
        self._num_characters_out = 0  # written by the engine's thread alone

    def take(self, client: bytes, command: Command) -> Reply | None:
        """The answer that can be given at once, None when the engine's thread gives it."""
        self.was_asked = True
        self.pauses.renew(client)
        if isinstance(command, GetStatus):
            return self.status(command.tag)
        if self.phase != "ready":
            return self._without_engine(command)
        if self._errands.qsize() >= MAX_WAITING_COMMANDS:
            return refuse(command, f"the engine is behind: {MAX_WAITING_COMMANDS} commands wait already")
        if self._num_characters_in - self._num_characters_out > MAX_WAITING_CHARACTERS:
            return refuse(command, f"the engine is behind: {MAX_WAITING_CHARACTERS} characters wait already")
        self._num_characters_in += _num_characters(command)
        self._errands.put((client, command))
        return None

    @property
    def paused(self) -> bool:
        """Whether somebody holds the engine's steps."""
        return self.pauses.any

    def put(self, client: bytes, errand: Lost | Stop | Joined | Tick) -> None:
        """Queue something that is not a client's command."""
        self._errands.put((client, errand))

    def join(self, client: bytes, joined: Joined) -> None:
        """Queue an introduction, like a command."""
        if self._errands.qsize() < MAX_WAITING_COMMANDS:
            self.put(client, joined)

    def ready(self, hello: Hello) -> None:
        """There is an engine now."""
        self.hello = hello
        self.phase = "ready"

    def fail(self, reason: str) -> None:
        """There is no engine, or no longer one."""
        self.reason = reason
        self.phase = "failed"

    def next_command(self, *, wait: bool) -> DeskCommand | None:
        """The oldest errand; with `wait`, sleeps until there is one."""
        try:
            errand = self._errands.get(block=wait)
        except Empty:
            return None
        self._num_characters_out += _num_characters(errand[1])
        return errand

    def refuse_waiting(self) -> list[tuple[bytes, Reply]]:
        """Negative answers to every command that waits, for when nobody is left to serve them."""
        replies: list[tuple[bytes, Reply]] = []
        while (errand := self.next_command(wait=False)) is not None:
            client, command = errand
            if not isinstance(command, Lost | Stop | Joined | Tick):
                replies.append((client, self._without_engine(command)))
        return replies

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


def _num_characters(command: Command | Lost | Stop | Joined | Tick) -> int:
    """How large a submission is; a token id counts as the few bytes it takes."""
    if not isinstance(command, Submit):
        return 0
    turns = sum(len(message.content) for message in command.messages or ())
    return len(command.prompt or "") + turns + 8 * len(command.prompt_token_ids or ())

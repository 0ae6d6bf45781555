"""Carries out clients' commands on the engine's thread, and routes what the engine says to who asked.

Owns whose request is whose. Knows the engine by `ServedEngine` alone, and the sockets by `reply` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec

from kvscope_engine.server.command_desk import CommandDesk, Joined
from kvscope_engine.server.open_requests import OpenRequests
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_engine.server.sessions import Sessions
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    BlockText,
    Command,
    Control,
    Done,
    Finished,
    FinishReason,
    GetBlockText,
    GetSnapshot,
    Refused,
    Reply,
    Submit,
    Tokens,
    refuse,
)
from kvscope_telemetry.messages.telemetry import Snapshot


class Dispatcher:
    """One for an engine. Every method runs on the engine's thread."""

    def __init__(
        self,
        engine: ServedEngine,
        desk: CommandDesk,
        reply: Callable[[bytes, Reply], None],
        name_of: Callable[[bytes], str] = lambda client: "",
    ) -> None:
        self.touched = False
        """Whether something changed that only a step tells the world."""
        self.stopping = False
        self._engine = engine
        self._desk = desk
        self._reply = reply
        self._name_of = name_of
        self._open = OpenRequests()
        self._sessions = Sessions()
        self._snapshot: Snapshot | None = None

    def serve(self, client: bytes, command: Command) -> None:
        """Do what `command` asks and answer it. A command that fails fails alone."""
        if not isinstance(command, GetSnapshot):
            self._snapshot = None
        try:
            self._say(client, self._do(client, command))
        except BadInput as error:
            self.touched = True  # the engine has noted the refusal
            self._say(client, refuse(command, str(error)))
        except Exception as error:  # one client's command must not end everybody's engine
            self._say(client, refuse(command, f"the engine failed on this command: {error!r:.200}"))

    def step(self) -> None:
        """One step of the engine; what it says goes to who asked."""
        self.touched = False
        self._snapshot = None
        self.route(self._engine.step())

    def route(self, outputs: Iterable[Tokens | Finished]) -> None:
        """Send each output to its request's client; those of lost clients go nowhere."""
        for output in outputs:
            client = self._open.owner(output)
            if client is not None:
                self._say(client, output)

    def join(self, client: bytes, joined: Joined) -> None:
        """A client says who it is: what it had on another connection is its again, and what it missed is said."""
        before = self._sessions.join(client, joined.session, joined.owner)
        if before is not None:
            self._open.move(before, client)
        for said in self._sessions.unheard(client, joined.awaited):
            self._reply(client, said)
        self._desk.wants_ticks = self._wants_ticks

    def lose(self, client: bytes) -> None:
        """A client is gone or does not read: work for it ends, at once or when it does not come back."""
        self._desk.pauses.release(client)
        if not self._sessions.leave(client):
            self._abort_all_of(client)
        self._desk.wants_ticks = self._wants_ticks

    def tick(self) -> None:
        """Time went by: look after those who hold the engine, and those who are away."""
        pauses = self._desk.pauses
        pauses.expire()
        for client in pauses.holders:
            self._reply(client, self._desk.status(0))  # a connection that is gone is noticed when something is said
        for client in self._sessions.expired():
            self._abort_all_of(client)
        self._desk.wants_ticks = self._wants_ticks

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """Say the last word on every open request; the engine is not asked."""
        for client, last in self._open.end_all(reason, error):
            self._say(client, last)

    def abort_all(self) -> bool:
        """Abort every open request, with the engine's own last words where it still has them; whether any was open."""
        open_ids = self._open.ids()
        for request_id in open_ids:
            self._engine.abort(request_id)
        with contextlib.suppress(Exception):  # the end is near; what follows needs no engine
            self.step()
        self.end_all("abort")
        return bool(open_ids)

    def _do(self, client: bytes, command: Command) -> Reply:
        if isinstance(command, Submit):
            return self._submit(client, command)
        if isinstance(command, Abort):
            return self._abort_for(client, command)
        if isinstance(command, GetSnapshot):
            return self._take_snapshot(command.tag)
        if isinstance(command, GetBlockText):
            return BlockText(contents=self._engine.block_text(command.blocks), tag=command.tag)
        if isinstance(command, Control):
            return self._control(client, command)
        return refuse(command, f"{type(command).__name__} is not served here")

    def _submit(self, client: bytes, submit: Submit) -> Reply:
        if submit.request_id in self._open:
            reason = f"request id {submit.request_id!r} is in use: ids are unique while a request lives"
            return Refused(request_id=submit.request_id, reason=reason)
        accepted = self._engine.submit(submit)
        self._open.open(client, submit, accepted)
        return accepted

    def _abort_for(self, client: bytes, command: Abort) -> Reply:
        name = command.request_id
        if name in self._open:
            if not (command.anyones or self._open.belongs_to(name, client)):
                return refuse(command, f"request {name!r:.140} is another client's: it is left alone")
            self._abort(name)
        return Done(request_id=name)

    def _abort_all_of(self, client: bytes) -> None:
        for request_id in self._open.of(client):
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self.touched = True
        if self._desk.paused:
            self._engine.snapshot(0)  # publishes what changed without a step
            for client, last in self._open.end_one(request_id, "abort"):
                self._say(client, last)

    def _take_snapshot(self, tag: int) -> Snapshot:
        """Askers between the same two steps share one: packing a million rows takes tens of milliseconds."""
        if self._snapshot is None:
            self._snapshot = self._engine.snapshot(tag)
        return msgspec.structs.replace(self._snapshot, tag=tag)

    def _say(self, client: bytes, reply: Reply) -> None:
        """To the client, or kept for it while it is away."""
        is_there = True
        if isinstance(reply, Accepted | Refused | Tokens | Finished):
            is_there = self._sessions.note(client, reply)
        if is_there:
            self._reply(client, reply)

    @property
    def _wants_ticks(self) -> bool:
        return self._desk.paused or self._sessions.any_away

    def _control(self, client: bytes, command: Control) -> Reply:
        if command.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif command.action == "shutdown":
            self.stopping = True
        elif command.action == "pause":
            self._desk.pauses.hold(client, self._name_of(client), command.lease_s)
        else:
            self._desk.pauses.release_all()
        self._desk.wants_ticks = self._wants_ticks
        return Done(tag=command.tag)

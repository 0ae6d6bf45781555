"""Carries out clients' commands on the engine's thread, and routes what the engine says to who asked.

Owns whose request is whose. Knows the engine by `ServedEngine` alone, and the sockets by `reply` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec

from kvscope_engine.server.command_desk import CommandDesk, refuse
from kvscope_engine.server.open_requests import OpenRequests
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Abort,
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
)
from kvscope_telemetry.messages.telemetry import Snapshot


class Dispatcher:
    """One for an engine. Every method runs on the engine's thread."""

    def __init__(self, engine: ServedEngine, desk: CommandDesk, reply: Callable[[bytes, Reply], None]) -> None:
        self.touched = False
        """Whether something changed that only a step tells the world."""
        self.stopping = False
        self._engine = engine
        self._desk = desk
        self._reply = reply
        self._open = OpenRequests()
        self._snapshot: Snapshot | None = None

    def serve(self, client: bytes, command: Command) -> None:
        """Do what `command` asks and answer it. A command that fails fails alone."""
        if not isinstance(command, GetSnapshot):
            self._snapshot = None
        try:
            self._reply(client, self._do(client, command))
        except BadInput as error:
            self.touched = True  # the engine has noted the refusal
            self._reply(client, refuse(command, str(error)))
        except Exception as error:  # one client's command must not end everybody's engine
            self._reply(client, refuse(command, f"the engine failed on this command: {error!r:.200}"))

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
                self._reply(client, output)

    def lose(self, client: bytes) -> None:
        """Stop working for a client that is gone or does not read."""
        for request_id in self._open.of(client):
            self._abort(request_id)

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """Say the last word on every open request; the engine is not asked."""
        for client, last in self._open.end_all(reason, error):
            self._reply(client, last)

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
            if self._open.belongs_to(command.request_id, client):
                self._abort(command.request_id)
            return Done(request_id=command.request_id)
        if isinstance(command, GetSnapshot):
            return self._take_snapshot(command.tag)
        if isinstance(command, GetBlockText):
            return BlockText(contents=self._engine.block_text(command.blocks), tag=command.tag)
        if isinstance(command, Control):
            return self._control(command)
        return refuse(command, f"{type(command).__name__} is not served here")

    def _submit(self, client: bytes, submit: Submit) -> Reply:
        if submit.request_id in self._open:
            reason = f"request id {submit.request_id!r} is in use: ids are unique while a request lives"
            return Refused(request_id=submit.request_id, reason=reason)
        accepted = self._engine.submit(submit)
        self._open.open(client, submit, accepted)
        return accepted

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self.touched = True
        if self._desk.paused:
            self._engine.snapshot(0)  # publishes what changed without a step
            for client, last in self._open.end_one(request_id, "abort"):
                self._reply(client, last)

    def _take_snapshot(self, tag: int) -> Snapshot:
        """Askers between the same two steps share one: packing a million rows takes tens of milliseconds."""
        if self._snapshot is None:
            self._snapshot = self._engine.snapshot(tag)
        return msgspec.structs.replace(self._snapshot, tag=tag)

    def _control(self, command: Control) -> Reply:
        if command.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif command.action == "shutdown":
            self.stopping = True
        else:
            self._desk.paused = command.action == "pause"
        return Done(tag=command.tag)

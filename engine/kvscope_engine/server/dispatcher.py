"""Carries out clients' commands on the engine's thread, and routes what the engine says to who asked.

Owns whose request is whose. Knows the engine by `ServedEngine` alone, and the sockets by `reply` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kvscope_engine.server.block_texts import BlockTextErrand
from kvscope_engine.server.command_desk import CommandDesk, Lost, Work, refuse
from kvscope_engine.server.limits import ServiceLimits
from kvscope_engine.server.open_requests import OpenRequests
from kvscope_engine.server.pending_submits import PendingSubmits
from kvscope_engine.server.preparation import Prepared
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_engine.server.shared_snapshots import SharedSnapshots
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Abort,
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


class Dispatcher:
    """One for an engine. Every method runs on the engine's thread."""

    def __init__(
        self,
        engine: ServedEngine,
        desk: CommandDesk,
        reply: Callable[[bytes, Reply], None],
        limits: ServiceLimits | None = None,
    ) -> None:
        self.touched = False
        """Whether something changed that only a step tells the world."""
        self.stopping = False
        limits = limits or ServiceLimits()
        self._engine = engine
        self._desk = desk
        self._reply = reply
        self._open = OpenRequests(limits)
        self._pending = PendingSubmits(engine.prompt_token_ids, desk.put, limits)
        self._snapshots = SharedSnapshots(engine, reply, limits.client_snapshots, lambda: self.has_work)

    @property
    def has_work(self) -> bool:
        """Whether there is a step to run."""
        return not self._desk.paused and (self._engine.has_unfinished or self.touched)

    def do(self, client: bytes, work: Work) -> None:
        """Do a piece of work for a client, whatever it is."""
        if isinstance(work, Lost):
            self.lose(client)
        elif isinstance(work, Prepared):
            self._submit_prepared(work)
        elif isinstance(work, BlockTextErrand):
            self._attempt(client, work.command, lambda: self._read_blocks(client, work))
        else:
            self.serve(client, work)

    def serve(self, client: bytes, command: Command) -> None:
        """Do what `command` asks and answer it. A command that fails fails alone."""
        self._attempt(client, command, lambda: self._do(client, command))

    def step(self) -> None:
        """One step of the engine; what it says goes to who asked."""
        self.touched = False
        self.route(self._engine.step())
        self._snapshots.tick()

    def route(self, outputs: Iterable[Tokens | Finished]) -> None:
        """Send each output to its request's client; those of lost clients go nowhere."""
        for output in outputs:
            client = self._open.owner(output)
            if client is not None:
                self._reply(client, output)

    def lose(self, client: bytes) -> None:
        """Stop working for a client that is gone or does not read."""
        self._snapshots.forget(client)
        self._pending.cancel_all_of(client)
        for request_id in self._open.of(client):
            self._abort(request_id)

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """Say the last word on every open request; the engine is not asked."""
        for client, last in self._open.end_all(reason, error):
            self._reply(client, last)
        why = f"the engine has ended: {error or 'it was stopped'}"
        for prepared in self._pending.close():
            self._reply(prepared.client, Refused(request_id=prepared.submit.request_id, reason=why))
        self._snapshots.refuse_all(why)

    def abort_all(self) -> bool:
        """Abort every open request, with the engine's own last words where it still has them; whether any was open."""
        open_ids = self._open.ids()
        for request_id in open_ids:
            self._engine.abort(request_id)
        with contextlib.suppress(Exception):  # the end is near; what follows needs no engine
            self.step()
        self.end_all("abort")
        return bool(open_ids)

    def _attempt(self, client: bytes, command: Command, do: Callable[[], Reply | None]) -> None:
        try:
            reply = do()
        except BadInput as error:
            self.touched = True  # the engine has noted the refusal
            reply = refuse(command, str(error))
        except Exception as error:  # one client's command must not end everybody's engine
            reply = refuse(command, f"the engine failed on this command: {error!r:.200}")
        if reply is not None:
            self._reply(client, reply)

    def _do(self, client: bytes, command: Command) -> Reply | None:
        """The answer, None when it is given later, or was given."""
        if isinstance(command, Submit):
            return self._prepare(client, command)
        if isinstance(command, Abort):
            self._abort_for(client, command.request_id)
            return Done(request_id=command.request_id)
        if isinstance(command, GetSnapshot):
            self._snapshots.ask(client, command.tag)
            return None
        if isinstance(command, GetBlockText):
            return self._read_blocks(client, BlockTextErrand(command))
        if isinstance(command, Control):
            return self._control(command)
        return refuse(command, f"{type(command).__name__} is not served here")

    def _read_blocks(self, client: bytes, errand: BlockTextErrand) -> Reply | None:
        answer = errand.advance(self._engine)
        if answer is None:
            self._desk.put_back(client, errand)
        return answer

    def _prepare(self, client: bytes, submit: Submit) -> Reply | None:
        """Have its prompt made into tokens; `_submit_prepared` goes on when they are there."""
        if submit.request_id in self._open or submit.request_id in self._pending:
            reason = f"request id {submit.request_id!r} is in use: ids are unique while a request lives"
            return Refused(request_id=submit.request_id, reason=reason)
        reason = self._pending.add(client, submit)
        return refuse(submit, f"the engine is behind: {reason}") if reason else None

    def _submit_prepared(self, prepared: Prepared) -> None:
        if self._pending.take(prepared):
            self._attempt(prepared.client, prepared.submit, lambda: self._submit(prepared))

    def _submit(self, prepared: Prepared) -> Reply:
        client, submit = prepared.client, prepared.submit
        reason = self._open.refusal(client, submit, prepared.num_tokens)
        if reason:
            return refuse(submit, reason)
        accepted = self._engine.submit(submit, prepared.token_ids.result)
        self._open.open(client, submit, accepted)
        self._changed()
        return accepted

    def _abort_for(self, client: bytes, request_id: str) -> None:
        prepared = self._pending.cancel(client, request_id)
        if prepared is not None:
            for last in prepared.aborted():
                self._reply(client, last)
        elif self._open.belongs_to(request_id, client):
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self.touched = True
        if self._desk.paused:
            self._engine.snapshot(0)  # publishes what changed without a step
            for client, last in self._open.end_one(request_id, "abort"):
                self._reply(client, last)

    def _changed(self) -> None:
        """A step will tell; while nothing steps, only a snapshot does."""
        if self._desk.paused:
            self._snapshots.is_stale = True

    def _control(self, command: Control) -> Reply:
        if command.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif command.action == "shutdown":
            self.stopping = True
        else:
            self._desk.paused = command.action == "pause"
            self._snapshots.tick()
        return Done(tag=command.tag)

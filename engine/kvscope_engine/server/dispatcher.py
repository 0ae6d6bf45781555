"""Carries out clients' commands on the engine's thread, and routes the engine's outputs to the clients.

Owns the map from requests to clients. Uses the engine only through `ServedEngine`, and the sockets only through `reply`
and `cut`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec

from kvscope_engine.server.client_interventions import ClientInterventions, HeartbeatFacts
from kvscope_engine.server.command_receiver import BlockTextQuery, ClientJoined, ClientLost, CommandReceiver, Task, Tick
from kvscope_engine.server.preparation import Preparation, Prepared, TokenIdsOf
from kvscope_engine.server.prompt_estimates import PreparedEstimate
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_engine.server.service_limits import ServiceLimits, refusal_text
from kvscope_engine.server.sessions import ClientSessions, OpenRequests
from kvscope_engine.server.shared_snapshots import SharedSnapshots
from kvscope_telemetry.errors import BadInput, PromptTooLong
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Command,
    Control,
    Done,
    EstimatePrompt,
    Finished,
    FinishReason,
    GetAllocatorMap,
    GetBlockText,
    GetSnapshot,
    Intervention,
    Refused,
    Reply,
    Submit,
    Tokens,
    refuse,
)


class Dispatcher:
    """Serves the clients of one engine. All methods are called on the engine's thread.

    `reply` sends a reply to a client; `cut` closes a client's connection.
    """

    def __init__(
        self,
        engine: ServedEngine,
        receiver: CommandReceiver,
        reply: Callable[[bytes, Reply], None],
        cut: Callable[[bytes], None],
        limits: ServiceLimits,
    ) -> None:
        self.needs_step = False
        """Whether a step must run to publish a change, even without requests."""
        self.stopping = False
        self._engine = engine
        self._receiver = receiver
        self._reply = reply
        self._cut = cut
        self._open_requests = OpenRequests(limits)
        self._pending = PendingSubmits(engine.prompt_token_ids, engine.has_grammar, receiver.enqueue_prepared, limits)
        self._sessions = ClientSessions()
        self._interventions = ClientInterventions(
            engine, receiver.pausing_clients, self._publish_facts, reply, receiver.name_of
        )
        self._snapshots = SharedSnapshots(engine, reply, limits.client_snapshots, lambda: self.has_work)

    @property
    def has_work(self) -> bool:
        may_step = not self._receiver.pausing_clients.is_paused or self._interventions.steps.has_pending
        return may_step and (self._engine.has_unfinished or self.needs_step)

    def while_idle(self) -> None:
        """Let the engine do deferred maintenance if it has no unfinished request and no command is queued."""
        if not self._engine.has_unfinished and not self._receiver.tasks.has_any and self._engine.while_idle():
            self._receiver.wants_ticks = True

    def handle(self, client: bytes, task: Task) -> None:
        if isinstance(task, ClientLost):
            self.disconnect(client)
        elif isinstance(task, ClientJoined):
            self.connect(client, task)
        elif isinstance(task, Tick):
            self.tick()
        elif isinstance(task, PreparedEstimate):
            self._attempt(client, task.command, lambda: task.answer(self._engine))
        elif isinstance(task, Prepared):
            self._submit_prepared(task)
        elif isinstance(task, BlockTextQuery):
            self._attempt(client, task.command, lambda: self._read_blocks(client, task))
        else:
            self.serve(client, task)

    def serve(self, client: bytes, command: Command) -> None:
        """Carry out and answer `command`. A failure affects only this command, unless the engine cannot continue."""
        self._attempt(client, command, lambda: self._execute(client, command))

    def step(self) -> None:
        self.needs_step = False
        is_single = self._receiver.pausing_clients.is_paused and self._interventions.steps.has_pending
        with (
            self._engine.pauses.single_step(self._interventions.requested_by) if is_single else contextlib.nullcontext()
        ):
            self.route(self._engine.step(ahead=not self._receiver.pausing_clients.is_paused))
        self._interventions.step_completed()
        self._snapshots.tick()

    def route(self, outputs: Iterable[Tokens | Finished]) -> None:
        for output in outputs:
            client = self._open_requests.client_of(output)
            if client is not None:
                self._send_or_retain(client, output)

    # Clients that connect, disconnect and reconnect.

    def connect(self, client: bytes, joined: ClientJoined) -> None:
        """Register a client's session.

        If the session was open on another connection, move its requests to `client`. Resend the replies that the client
        missed.
        """
        previous = self._sessions.connect(client, joined.session, joined.owner)
        if previous is not None and previous != client:
            self._move(previous, client)
        in_progress = self._receiver.submits_of(client) | set(self._pending.ids_of(client))
        unanswered = (awaited for awaited in joined.awaited if awaited.request_id not in in_progress)
        for reply in self._sessions.missed_replies(client, unanswered):
            self._reply(client, reply)
        self._receiver.wants_ticks = self._wants_ticks

    def disconnect(self, client: bytes) -> None:
        """Handle a client that disconnected or no longer reads its messages.

        If the client may return to its session, its requests are aborted only after it has been away for too long,
        otherwise immediately.
        """
        self._snapshots.remove_client(client)
        self._receiver.pausing_clients.end(client)
        self._report_resumed("its connection ended")
        self._interventions.disconnect(client)
        may_return = self._sessions.mark_away(client)
        for refusal in self._receiver.refuse_lost(client, may_return=may_return):
            self._reply(client, refusal)
        if may_return:
            self._cut(client)  # a client that only stopped reading reconnects and receives what it missed
        else:
            self._abort_requests_of(client)
        self._receiver.wants_ticks = self._wants_ticks

    def tick(self) -> None:
        """Expire pauses, and the sessions of clients that are away."""
        self._engine.pauses.report_suspensions()
        pauses = self._receiver.pausing_clients
        pauses.expire()
        self._report_resumed("the client that paused it is gone")
        self._interventions.end_steps_if_resumed()
        for client in {*pauses.clients, *self._interventions.clients}:
            self._reply(client, self._receiver.status(0))  # a dead connection is noticed only when something is sent
        for client in self._sessions.expired():
            self._abort_requests_of(client)
        self._receiver.wants_ticks = self._wants_ticks

    def _move(self, previous: bytes, client: bytes) -> None:
        """Move everything of a previous connection to the client's new connection, including queue positions
        and usage of the limits.
        """
        self._snapshots.remove_client(previous)
        self._receiver.move(previous, client)
        self._pending.move(previous, client)
        self._open_requests.move(previous, client)

    def _abort_requests_of(self, client: bytes) -> None:
        for request_id in (*self._pending.ids_of(client), *self._open_requests.ids_of(client)):
            self._abort(request_id)

    # Shutdown.

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """Send the last message of every open request and refuse all waiting commands, without using the engine."""
        for client, message in self._open_requests.end_all(reason, error):
            self._send_or_retain(client, message)
        why = f"the engine has ended: {error or 'it was stopped'}"
        for prepared in self._pending.close():
            self._send_or_retain(prepared.client, Refused(request_id=prepared.submit.request_id, reason=why))
        self._snapshots.refuse_all(why)

    def abort_all(self) -> bool:
        """Abort every open request. Clients get the last messages from the engine, or without it if the engine fails.

        Returns whether any request was open.
        """
        open_ids = self._open_requests.ids()
        for request_id in open_ids:
            self._engine.abort(request_id)
        with contextlib.suppress(Exception):  # shutting down; what follows needs no engine
            self.step()
        self.end_all("abort")
        return bool(open_ids)

    # Commands.

    def _attempt(self, client: bytes, command: Command, execute: Callable[[], Reply | None]) -> None:
        try:
            reply = execute()
        except BadInput as error:
            self.needs_step = True  # the engine recorded the refusal
            reply = refuse(command, str(error))
            if isinstance(reply, Refused) and isinstance(error, PromptTooLong):
                reply = msgspec.structs.replace(reply, is_too_long=True)
        except Exception as error:  # one client's command must not end the engine, unless the engine cannot continue
            reply = refuse(command, f"the engine failed on this command: {error!r:.200}")
            if self._engine.failure:
                self._send_or_retain(client, reply)
                raise
        if reply is not None:
            self._send_or_retain(client, reply)

    def _execute(self, client: bytes, command: Command) -> Reply | None:
        """Carry out a command and return the reply; None if the reply was sent already or is sent later."""
        if isinstance(command, Submit):
            return self._prepare(client, command)
        if isinstance(command, Abort):
            return self._abort_for(client, command)
        if isinstance(command, EstimatePrompt):
            return self._pending.estimate(client, command, self._engine.num_text_tokens)
        if isinstance(command, GetSnapshot):
            self._snapshots.request(client, command.tag)
            return None
        if isinstance(command, GetBlockText):
            return self._read_blocks(client, BlockTextQuery(command))
        if isinstance(command, GetAllocatorMap):
            return self._engine.allocator_map(command.tag)
        if isinstance(command, Control):
            return self._control(client, command)
        if isinstance(command, Intervention):
            reply = self._interventions.execute(client, command)
            self._receiver.wants_ticks = self._wants_ticks
            return reply
        return refuse(command, f"{type(command).__name__} is not available here")

    def _read_blocks(self, client: bytes, query: BlockTextQuery) -> Reply | None:
        answer = query.advance(self._engine)
        if answer is None:
            self._receiver.tasks.requeue(client, query)
        return answer

    def _prepare(self, client: bytes, submit: Submit) -> Reply | None:
        """Start tokenizing the prompt. `_submit_prepared` continues after that."""
        if submit.request_id in self._open_requests or submit.request_id in self._pending:
            reason = f"request id {submit.request_id!r} is in use: ids are unique while a request lives"
            return Refused(request_id=submit.request_id, reason=reason)
        reason = self._pending.start(client, submit)
        return refuse(submit, refusal_text(reason)) if reason else None

    def _submit_prepared(self, prepared: Prepared) -> None:
        if self._pending.pop(prepared):
            self._attempt(prepared.client, prepared.submit, lambda: self._submit(prepared))
            for index in prepared.aborted_indexes:
                self._abort(prepared.submit.request_id, index)

    def _submit(self, prepared: Prepared) -> Reply:
        client, submit = prepared.client, prepared.submit
        reason = self._open_requests.refusal(client, submit, prepared.num_tokens)
        if reason:
            return refuse(submit, reason)
        on_behalf_of = submit.client or client.hex()  # the client for fair scheduling
        accepted = self._engine.submit(msgspec.structs.replace(submit, client=on_behalf_of), prepared.token_ids.result)
        self._open_requests.register(client, submit, accepted)
        if self._receiver.pausing_clients.is_paused:
            self._snapshots.is_stale = True  # no step will publish the request
        return accepted

    def _abort_for(self, client: bytes, command: Abort) -> Reply:
        request_id = command.request_id
        if request_id in self._open_requests or request_id in self._pending:
            is_own = self._open_requests.belongs_to(request_id, client) or self._pending.belongs_to(request_id, client)
            if not (command.anyones or is_own):
                return refuse(command, f"request {request_id!r:.140} belongs to another client")
            self._abort(request_id, command.index)
        elif command.index is None:
            for submit in self._receiver.remove_submits(client, request_id):
                self._abort_prepared(Prepared(client, submit))
        return Done(request_id=request_id)

    def _abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._pending:
            if index is None:
                self._abort_prepared(self._pending.cancel(request_id))
            else:
                self._pending.abort_once_open(request_id, index)
            return
        self._engine.abort(request_id, index)
        self.needs_step = True
        if self._receiver.pausing_clients.is_paused:
            self._engine.snapshot(0)  # publishes what changed without a step
            for client, message in self._open_requests.end_one(request_id, "abort", index):
                self._send_or_retain(client, message)

    def _abort_prepared(self, prepared: Prepared) -> None:
        self._engine.record_aborted(prepared.submit)
        self.needs_step = True
        if self._receiver.pausing_clients.is_paused:
            self._engine.snapshot(0)  # publishes what changed without a step
        for message in prepared.abort_messages():
            self._send_or_retain(prepared.client, message)

    def _control(self, client: bytes, command: Control) -> Reply | None:
        if command.action == "step":
            return self._interventions.step(client, command)
        if command.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
            self._interventions.reset()
        elif command.action == "shutdown":
            self.stopping = True
        elif command.action == "pause":
            self._receiver.pausing_clients.pause(client, self._receiver.name_of(client), command.lease_s)
            self.route(self._engine.finish_in_flight())
            self._engine.pauses.pause(self._receiver.name_of(client))
        else:
            self._receiver.pausing_clients.end_all()
            self._report_resumed(f"resumed by {self._receiver.name_of(client)}")
            self._interventions.end_steps_if_resumed()
        self._snapshots.tick()  # while no step runs, a snapshot is due immediately
        self._receiver.wants_ticks = self._wants_ticks
        return Done(tag=command.tag)

    def _report_resumed(self, why: str) -> None:
        """Report to the engine that it is resumed, unless another client still pauses it."""
        if not self._receiver.pausing_clients.is_paused:
            self._engine.pauses.resume(why)

    def _publish_facts(self, facts: HeartbeatFacts) -> None:
        self._receiver.facts = facts

    def _send_or_retain(self, client: bytes, reply: Reply) -> None:
        is_connected = True
        if isinstance(reply, Accepted | Refused | Tokens | Finished):
            is_connected = self._sessions.retain(client, reply)
        if is_connected:
            self._reply(client, reply)

    @property
    def _wants_ticks(self) -> bool:
        return self._receiver.pausing_clients.is_paused or bool(self._interventions.clients) or self._sessions.any_away


class PendingSubmits:
    """Submissions whose prompts are being tokenized, by request id. A client may abort its own submissions.

    All methods are called on the engine's thread. `on_prepared(client, prepared)` is called on another thread.
    """

    def __init__(
        self,
        token_ids_of: TokenIdsOf,
        has_grammar: Callable[[Submit], bool],
        on_prepared: Callable[[bytes, Prepared], None],
        limits: ServiceLimits,
    ) -> None:
        self._preparation = Preparation(
            token_ids_of, has_grammar, lambda prepared: on_prepared(prepared.client, prepared), limits
        )
        self._pending: dict[str, Prepared] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def start(self, client: bytes, submit: Submit) -> str:
        """Start tokenizing the prompt of a submission. Returns the reason if a limit would be exceeded, else ""."""
        prepared = Prepared(client, submit)
        reason = self._preparation.enqueue(prepared)
        if not reason:
            self._pending[submit.request_id] = prepared
        return reason

    def estimate(self, client: bytes, command: EstimatePrompt, num_text_tokens: Callable[[str], int]) -> Reply | None:
        """Start tokenizing a prompt that is only estimated. Returns a refusal if a limit would be exceeded."""
        reason = self._preparation.enqueue(PreparedEstimate(client, command, num_text_tokens))
        return refuse(command, refusal_text(reason), is_temporary=True) if reason else None

    def pop(self, prepared: Prepared) -> bool:
        """Remove a submission whose prompt is tokenized. Returns False if it was cancelled."""
        if self._pending.get(prepared.submit.request_id) is not prepared:
            return False
        del self._pending[prepared.submit.request_id]
        return True

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        prepared = self._pending.get(request_id)
        return prepared is not None and prepared.client == client

    def ids_of(self, client: bytes) -> list[str]:
        return [request_id for request_id, prepared in self._pending.items() if prepared.client == client]

    def move(self, previous: bytes, client: bytes) -> None:
        """Move a client's submissions to its new connection, including those that are tokenized but not submitted
        yet.
        """
        self._preparation.move(previous, client)
        for request_id in self.ids_of(previous):
            self._pending[request_id].client = client

    def abort_once_open(self, request_id: str, index: int) -> None:
        """Mark completion `index` to be aborted when the request has been submitted to the engine."""
        self._pending[request_id].aborted_indexes.add(index)

    def cancel(self, request_id: str) -> Prepared:
        prepared = self._pending.pop(request_id)
        self._preparation.cancel(prepared)
        return prepared

    def close(self) -> list[Prepared]:
        """Stop the tokenizing threads. Returns the pending submissions, oldest first."""
        self._preparation.close()
        pending, self._pending = list(self._pending.values()), {}
        return pending

"""The engine's process: binds the sockets, loads the model, then serves commands, steps and token streams until
shutdown.

Owns the phases of the process. The thread that calls `run` is the engine thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvscope_engine.server.command_receiver import CommandReceiver
from kvscope_engine.server.dispatcher import Dispatcher
from kvscope_engine.server.served_engine import BuildEngine, ServedEngine
from kvscope_engine.server.service_limits import ServiceLimits
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.devices.device_watch import SAMPLE_S, DeviceWatch
from kvscope_telemetry.errors import EngineDead, KvscopeError
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Goodbye, Heartbeat, Hello, Progress
from kvscope_telemetry.transport.server_sockets import ServerSockets

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.engine_recorder import EngineRecorder

TASK_TIME_BOUNDS_S: Final = (0.000_5, 0.004)
"""Lower and upper bound in seconds of the time spent on commands between two steps, which is otherwise half of the last
step's duration.

This limits a flood of commands, however costly each is, to about a third of the engine's time.
"""
FAILED_GRACE_S: Final = 1.0
"""Seconds for which a failed engine still answers `GetStatus` with the reason, if any client had sent a command."""
CLOSE_DELAY_S: Final = 0.2
"""Seconds for which connections stay open after the last messages, because closing a connection may discard
messages that the client has not read yet.
"""


class Interrupted(BaseException):
    """Raised by a signal on the engine's thread while a model loads.

    Not an Exception, so that no handler swallows it.
    """


class EngineService:
    """Serves the engine returned by `build` on `endpoint`.

    The sockets are bound on construction. Raises BadInput for an endpoint that is not accepted, EndpointInUse if it is
    in use.

    Args:
        keyless: Role of clients without a key.
        on_progress: Called with the progress of loading.
        interrupt: Called when a client requests a shutdown while the model loads.
        recorder: Records all published messages.
        sample_s: Seconds between two samples of the devices.
        on_ready: Called with the `Hello` message once the engine is loaded.
    """

    def __init__(
        self,
        endpoint: str,
        build: BuildEngine,
        *,
        keys: KeyRing | None = None,
        keyless: Role = Role.VIEWER,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        interrupt: Callable[[], None] = lambda: None,
        limits: ServiceLimits | None = None,
        recorder: EngineRecorder | None = None,
        sample_s: float = SAMPLE_S,
        on_ready: Callable[[Hello], None] = lambda hello: None,
    ) -> None:
        self._build = build
        self._sample_s = sample_s
        self._recorder = recorder
        self._limits = limits or ServiceLimits()
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._engine: ServedEngine | None = None
        self.receiver = CommandReceiver(interrupt, self._limits)
        self.sockets = ServerSockets(
            endpoint,
            on_command=self.receiver.receive,
            heartbeat=self._heartbeat,
            keys=keys,
            keyless=keyless,
            on_client_lost=self.receiver.report_lost,
            on_published=recorder.record if recorder is not None else None,
        )
        self.receiver.serve(self.sockets)
        self.is_loading = True
        """Whether the model is loading. Only then may an `Interrupted` be raised on the engine's thread to stop
        the process immediately.
        """

    @property
    def telemetry_endpoint(self) -> str:
        return self.sockets.telemetry_endpoint

    def stop(self) -> None:
        """Request an orderly shutdown, from any thread or a signal handler.

        While a model loads, the request takes effect after loading. Queued commands are refused; the last messages are
        sent after the step or command in progress.
        """
        self.receiver.tasks.stop()

    def run(self) -> None:
        """Load, serve and shut down. Returns after an orderly stop; raises the error that ended the engine."""
        reason = ""
        try:
            dispatcher = self._load()
            if dispatcher is not None:
                self._serve(dispatcher)
        except Exception as error:
            reason = error_line(error)
            raise
        finally:
            self.is_loading = False
            self._shut_down(reason)

    # Phases, in order.

    def _load(self) -> Dispatcher | None:
        try:
            engine = self._build(self._progress, self.sockets.publish, lambda: self.sockets.messages_dropped)
            self.is_loading = False
        except Interrupted:
            return None
        self._engine = engine
        # First the dispatcher, which makes the engine's adapters known: a status must not be "ready" without them.
        dispatcher = Dispatcher(engine, self.receiver, self.sockets.reply, self.sockets.cut, self._limits)
        self.receiver.ready(engine.hello)
        self._on_ready(engine.hello)
        return dispatcher

    def _serve(self, dispatcher: Dispatcher) -> None:
        engine = self._engine
        assert engine is not None, "the engine was loaded"
        sampling = DeviceWatch(engine.hello, engine.memory, self.sockets.publish, sample_s=self._sample_s)
        try:
            step_s = 0.0
            while self._serve_tasks(dispatcher, step_s):
                if dispatcher.has_work:
                    started_s = time.monotonic()
                    self.receiver.busy_since_ns = time.monotonic_ns()
                    dispatcher.step()
                    self.receiver.busy_since_ns = 0
                    step_s = time.monotonic() - started_s
            if engine.failure:
                raise EngineDead(engine.failure)
            was_any_open = dispatcher.abort_all()
            self._record_state()  # for the recorder: requests ended by the abort
            if was_any_open or dispatcher.stopping:
                time.sleep(CLOSE_DELAY_S)
        except Exception as error:
            reason = engine.failure or f"the engine died in a step: {error_line(error)}"
            dispatcher.end_all("error", reason)
            self._fail(reason)
            raise EngineDead(reason) from error
        finally:
            sampling.close()

    def _serve_tasks(self, dispatcher: Dispatcher, step_s: float) -> bool:
        """Serve queued tasks, and sleep while no step can run. Returns False when the service must shut down."""
        deadline_s = time.monotonic() + min(max(step_s / 2, TASK_TIME_BOUNDS_S[0]), TASK_TIME_BOUNDS_S[1])
        self._record_state()
        while not self.receiver.tasks.is_stopped:
            is_idle = not dispatcher.has_work
            if is_idle:
                dispatcher.while_idle()
            task = self.receiver.tasks.next(wait=is_idle)
            if task is None:
                break
            self.receiver.busy_since_ns = time.monotonic_ns()
            dispatcher.handle(*task)
            self.receiver.busy_since_ns = 0
            if dispatcher.stopping:
                return False
            if not is_idle and time.monotonic() >= deadline_s:
                break
        return not self.receiver.tasks.is_stopped

    def _record_state(self) -> None:
        if self._recorder is not None and self._engine is not None and self._recorder.wants_snapshot:
            self._recorder.add_snapshot(self._engine.snapshot(0))
        if self._recorder is not None and self._engine is not None and (blocks := self._recorder.wants_texts):
            self._recorder.add_texts(self._engine.block_text(blocks))
        if self._recorder is not None and self._engine is not None and self._recorder.texts is not None:
            self._recorder.add_requests(self._engine.drain_ended())

    def _fail(self, reason: str) -> None:
        self.receiver.fail(reason)
        for client, reply in self.receiver.refuse_waiting():
            self.sockets.reply(client, reply)

    def _shut_down(self, reason: str) -> None:
        engine, self._engine = self._engine, None
        self._fail(reason or "it was stopped")
        self.sockets.publish(Goodbye(epoch=engine.hello.epoch if engine is not None else 0, reason=reason))
        if reason and self.receiver.has_received_commands:
            time.sleep(FAILED_GRACE_S)
        self.sockets.close()
        if engine is not None:
            with contextlib.suppress(Exception):  # the engine may be broken
                engine.close()

    # Called on other threads.

    def _progress(self, progress: Progress) -> None:
        self.receiver.progress = progress
        self.sockets.publish(progress)
        self._on_progress(progress)

    def _heartbeat(self) -> Heartbeat | None:
        engine = self._engine
        if engine is None:
            return None
        if engine.pauses.beat() or self.receiver.wants_ticks:
            self.receiver.wants_ticks = False  # until the engine's thread handled this one
            self.receiver.tick()
        facts = self.receiver.facts
        return Heartbeat(
            epoch=engine.hello.epoch,
            time_ns=time.monotonic_ns(),
            seq=engine.last_seq,
            step=engine.step_count,
            num_unfinished=engine.num_unfinished,
            step_started_ns=engine.step_started_ns,
            paused_by=self.receiver.pausing_clients.names,
            pinned=facts.pinned,
            pinned_by=facts.pinned_by,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
        )


def error_line(error: BaseException) -> str:
    """Return the text of an error in one line: the message of a KvscopeError, type and message of others."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, KvscopeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

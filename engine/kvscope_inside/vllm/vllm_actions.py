"""Executes operators' commands for vLLM between two steps, on the engine core's own thread.

Owns the queue of commands, and a pause with its lease: the pause ends if its client sends no message for the lease's
duration. vLLM itself notifies the clients of aborted requests.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvscope_inside.hooks import Hooks
from kvscope_inside.publisher import Answer
from kvscope_telemetry.messages.commands import Abort, Control, Done, Evict, Preempt, refuse

if TYPE_CHECKING:
    from kvscope_inside.vllm.vllm_recorder import VllmRecorder
    from kvscope_inside.vllm.vllm_translator import VllmTranslator

Action = Abort | Control | Preempt | Evict
MAX_LEASE_S: Final = 30.0
"""Lease of a pause in seconds, used if the client that pauses the engine requests no other lease. Each message
from the client renews it.
"""


class VllmActions:
    """Executes commands on one scheduler.

    `on_serving` is called with the scheduler's engine core when the engine core starts to serve. `submit` and
    `record_activity` are called on the sockets' thread, `poll` on the publishing thread, and all other methods on the
    engine core's thread.
    """

    def __init__(self, hooks: Hooks, on_serving: Callable[[Any], None]) -> None:
        self.paused_by = ""
        self._on_serving = on_serving
        self._commands: deque[tuple[bytes, Action, str, Answer]] = deque()
        self._engine: Any = None
        self._pausing_client = b""
        self._lease_s = MAX_LEASE_S
        self._last_activity_s = 0.0
        self._paused_ns = 0
        self._steps_left = 0
        self._step_answer: Answer | None = None
        self._recorder: VllmRecorder
        self._translator: VllmTranslator
        self._install_hooks(hooks)

    def bind(self, recorder: VllmRecorder, translator: VllmTranslator) -> None:
        self._recorder, self._translator = recorder, translator

    # Called on other threads.

    def record_activity(self, client: bytes) -> None:
        if client == self._pausing_client:
            self._last_activity_s = time.monotonic()

    def submit(self, client: bytes, command: Action, by: str, answer: Answer) -> None:
        self._commands.append((client, command, by, answer))
        self._wake()

    def poll(self) -> None:
        if self.paused_by and time.monotonic() - self._last_activity_s > self._lease_s:
            resume = Control(action="resume")
            self._commands.append((b"", resume, f"{self.paused_by} (connection lost)", lambda reply: None))
            self._last_activity_s = time.monotonic()
            self._wake()

    def _wake(self) -> None:
        if self._engine is None:
            return
        from vllm.v1.engine import EngineCoreRequestType

        wakeup = getattr(EngineCoreRequestType, "WAKEUP", None)
        if wakeup is not None:
            try:
                self._engine.input_queue.put_nowait((wakeup, None))
            except queue.Full:
                return  # the full queue wakes it anyway

    # Called on the engine core's thread.

    def _install_hooks(self, hooks: Hooks) -> None:
        from vllm.v1.engine import core

        hooks.before(core.EngineCoreProc, "_handle_client_request", self._before_client_request)
        for kind in (core.EngineCoreProc, getattr(core, "DPEngineCoreProc", None)):
            if kind is not None and "run_busy_loop" in vars(kind):
                hooks.before(kind, "run_busy_loop", self._before_busy_loop)

    def _before_busy_loop(self, engine: Any, *_: Any, **__: Any) -> None:
        if engine.scheduler is self._recorder.scheduler:
            self._engine = engine
            self._on_serving(engine)

    def _before_client_request(self, engine: Any, *_: Any, **__: Any) -> None:
        if engine.scheduler is self._recorder.scheduler:
            self._engine = engine
            self.run()
            self._recorder.flush()

    def before_step(self) -> None:
        """Execute queued commands, and pause again when the requested number of single steps has run."""
        if self._step_answer is not None:
            self._count_steps()
        self.run()

    def run(self) -> None:
        while self._commands:
            client, command, by, answer = self._commands.popleft()
            try:
                reply = self._execute(client, command, by, answer)
            except Exception as error:
                reply = refuse(command, f"vLLM did not do it: {type(error).__name__}: {error}"[:500])
            if reply is not None:
                answer(reply)

    def _execute(self, client: bytes, command: Action, by: str, answer: Answer) -> Any:
        if isinstance(command, Abort):
            return self._abort(command)
        if isinstance(command, Preempt):
            return self._preempt(command, by)
        if isinstance(command, Evict):
            return self._evict(command)
        if command.action == "reset_prefix_cache":
            return self._reset(command)
        if command.action == "pause":
            return self._pause(client, command, by)
        if command.action == "resume":
            return self._resume(command, by)
        if command.action == "step":
            return self._step(command, answer)
        return refuse(command, "vLLM is stopped where it was started")

    def _abort(self, command: Abort) -> Any:
        from vllm.v1.request import RequestStatus

        send = getattr(self._engine, "_send_abort_outputs", None)
        if send is None:
            return refuse(command, "this version of vLLM has no way to tell the client of an aborted request")
        scheduler = self._recorder.scheduler
        aborted = scheduler.finish_requests(command.request_id, RequestStatus.FINISHED_ABORTED)
        send(aborted)
        return Done(request_id=command.request_id)

    def _preempt(self, command: Preempt, by: str) -> Any:
        scheduler, known_request = self._recorder.scheduler, self._translator.request_by_number(command.number)
        request_id = known_request.host.request_id if known_request is not None else None
        request = next((each for each in scheduler.running if each.request_id == request_id), None)
        if request is None:
            return refuse(command, f"request #{command.number} does not run")
        if command.how == "swap":
            return refuse(command, "vLLM computes again what it preempts: swap is not accepted")
        if not hasattr(request, "drop_stale_output"):
            return refuse(command, "this version of vLLM cannot preempt between two steps")
        scheduler.running.remove(request)
        self._recorder.asked_by = by
        try:
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        finally:
            self._recorder.asked_by = ""
        getattr(scheduler, "prev_step_scheduled_req_ids", set()).discard(request_id)
        return Done(tag=command.tag, what=f"request #{command.number} was preempted")

    def _evict(self, command: Evict) -> Any:
        pool = self._recorder.scheduler.kv_cache_manager.block_pool
        blocks = [pool.blocks[block] for block in set(command.blocks) if block < len(pool.blocks)]
        idle = {block.block_id for block in blocks if block.ref_cnt == 0 and block.block_hash is not None}
        pool.evict_blocks(idle)
        num_other = len(set(command.blocks)) - len(idle)
        reason = "1 cached block was evicted" if len(idle) == 1 else f"{len(idle)} cached blocks were evicted"
        return Done(tag=command.tag, what=reason + (f"; {num_other} hold no idle prefix" if num_other else ""))

    def _reset(self, command: Control) -> Any:
        if self._recorder.scheduler.reset_prefix_cache():
            return Done(tag=command.tag, what="the prefix cache is empty")
        return refuse(command, "vLLM empties its prefix cache only while no request holds a block")

    def _pause(self, client: bytes, command: Control, by: str) -> Any:
        if self.paused_by:
            return refuse(command, f"paused by {self.paused_by} already")
        self._set_paused(True)
        self.paused_by, self._pausing_client, self._last_activity_s = by or "a client", client, time.monotonic()
        self._lease_s, self._paused_ns = command.lease_s or MAX_LEASE_S, time.monotonic_ns()
        self._recorder.record_event("paused", self.paused_by)
        return Done(tag=command.tag)

    def _resume(self, command: Control, by: str) -> Any:
        if not self.paused_by:
            return Done(tag=command.tag)
        self._end_steps("engine resumed")
        self._set_paused(False)
        paused_by, self.paused_by, self._pausing_client = self.paused_by, "", b""
        self._recorder.record_event("resumed", paused_by, time.monotonic_ns() - self._paused_ns, f"resumed by {by}")
        return Done(tag=command.tag)

    def _step(self, command: Control, answer: Answer) -> Any:
        if not self.paused_by:
            return refuse(command, "the engine is not paused")
        if not self._recorder.scheduler.requests:
            return refuse(command, "no unfinished request: there is no step to run")
        if self._step_answer is not None:
            return refuse(command, "steps are being run already")
        self._steps_left = command.num_steps + 1  # the call below counts once before the first step
        self._step_answer = lambda reply: answer(Done(tag=command.tag, what=getattr(reply, "what", "")))
        self._set_paused(False)
        self._count_steps()
        return None

    def _count_steps(self) -> None:
        """Decrement the number of requested single steps, and pause when the last one has run. Called before
        each step.
        """
        self._steps_left -= 1
        if self._steps_left <= 0 or not self._recorder.scheduler.requests:
            self._set_paused(True)
            self._end_steps("")

    def _end_steps(self, reason: str) -> None:
        answer, self._step_answer = self._step_answer, None
        if answer is not None:
            answer(Done(what=reason))

    def _set_paused(self, is_paused: bool) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._recorder.scheduler.set_pause_state(PauseState.PAUSED_ALL if is_paused else PauseState.UNPAUSED)

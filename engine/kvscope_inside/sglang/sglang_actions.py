"""Executes operators' commands for SGLang on its scheduler's own thread, before the scheduler polls for requests.

Owns the queue of commands. SGLang itself notifies the clients of aborted requests.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvscope_inside.publisher import Answer
from kvscope_telemetry.messages.commands import Abort, Control, Done, Evict, Preempt, refuse

Action = Abort | Control | Preempt | Evict
CANNOT_ALONE = "the ranks of this model must all do the same: SGLang is asked by its own API alone"


class SglangActions:
    """Executes commands on one scheduler. Refuses all commands if the model has several ranks, which must stay
    synchronous.
    """

    def __init__(self, scheduler: Any, num_ranks: int) -> None:
        self.paused_by = ""
        self._scheduler, self._is_alone = scheduler, num_ranks == 1
        self._commands: deque[tuple[Action, Answer]] = deque()

    # Called on the sockets' thread.

    def record_activity(self, client: bytes) -> None:
        """Do nothing: pauses of SGLang have no lease that a client's activity could renew."""

    def submit(self, client: bytes, command: Action, by: str, answer: Answer) -> None:
        self._commands.append((command, answer))

    # Called on the scheduler's thread.

    def run(self) -> None:
        while self._commands:
            command, answer = self._commands.popleft()
            try:
                reply = self._execute(command)
            except Exception as error:
                reply = refuse(command, f"SGLang did not do it: {type(error).__name__}: {error}"[:500])
            answer(reply)

    def _execute(self, command: Action) -> Any:
        if not self._is_alone:
            return refuse(command, CANNOT_ALONE)
        if isinstance(command, Abort):
            return self._abort(command)
        if isinstance(command, Control) and command.action == "reset_prefix_cache":
            if self._scheduler.flush_cache():
                return Done(tag=command.tag, what="the prefix cache is empty")
            return refuse(command, "SGLang empties its prefix cache only while it has no request")
        return refuse(command, "SGLang cannot do that between two steps")

    def _abort(self, command: Abort) -> Any:
        scheduler, request_id = self._scheduler, command.request_id
        known_ids = {str(other.rid) for other in (*scheduler.waiting_queue, *scheduler.collect_inflight_reqs())}
        if getattr(scheduler, "chunked_req", None) is not None:
            known_ids.add(str(scheduler.chunked_req.rid))
        if request_id not in known_ids:
            return refuse(command, f"SGLang has no request {request_id}")
        if any(other != request_id and other.startswith(request_id) for other in known_ids):
            return refuse(command, "the names of other requests begin with its name: SGLang would abort them, too")
        from sglang.srt.managers.io_struct import AbortReq

        scheduler.abort_request(AbortReq(rid=request_id))
        return Done(request_id=request_id)

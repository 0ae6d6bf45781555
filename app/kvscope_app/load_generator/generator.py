"""Submits many requests, to show the cache under pressure, and aborts them when stopped.

Owns the load's requests from submission to their end, and the counts. At most `MAX_CONCURRENCY` requests are
unfinished. After a request was refused, the generator pauses before it submits the next one.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.load_generator.load_settings import MAX_CONCURRENCY, LoadSettings, Pace, make_request
from kvscope_app.load_generator.sample_prompts import sample_prompts
from kvscope_app.session.session import Session
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Abort, Accepted, Command, Failed, Finished, Refused, Reply, Tokens
from kvscope_telemetry.source import SourceState

TICK_MS: Final = 50
MAX_NEW_PER_TICK: Final = 32
_PAUSE_AFTER_REFUSAL_S: Final = 0.5
_ENGINE_STOPPED: Final = "The engine stopped."


@dataclass(slots=True)
class LoadCounts:
    sent: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    lost: int = 0
    """Number of requests that failed, or that were unfinished when the engine ended."""
    tokens: int = 0


class LoadGenerator(QObject):
    changed = Signal()
    """Emitted by `start` and `stop`, and at most once per timer tick when the counts or the state have changed."""

    def __init__(self, session: Session, parent: QObject | None = None, *, rng: random.Random | None = None) -> None:
        """`rng` draws prompts, lengths and times between requests. A seeded `rng` makes a load reproducible."""
        super().__init__(parent)
        self.counts = LoadCounts()
        self.message = ""
        """Reason why the load does not run as requested, in one line; empty if there is none."""
        self._session = session
        self._settings = LoadSettings()
        self._unfinished: dict[str, int] = {}  # number of output tokens received, by request id
        self._is_running = False
        self._epoch: int | None = None
        self._prompts: tuple[str, ...] = ()
        self._rng = rng or random.Random()
        self._next_s = 0.0
        self._has_changes = False
        self._timer = QTimer(self)
        self._timer.setInterval(TICK_MS)
        self._timer.timeout.connect(self.tick)
        session.replies.connect(self._on_replies)
        session.status_changed.connect(self._on_status)

    @property
    def is_running(self) -> bool:
        return self._is_running

    @property
    def is_stopping(self) -> bool:
        """Whether the load was stopped and some of its aborted requests have not ended yet."""
        return not self._is_running and bool(self._unfinished)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def start(self, settings: LoadSettings) -> None:
        """Start a load, or continue the running one with other settings."""
        if not self._is_running:
            self.counts = LoadCounts(sent=len(self._unfinished))
        self._prompts = self._prompts or sample_prompts()
        self._settings, self._is_running, self.message = settings, True, ""
        self._epoch = self._session.live_mirror.epoch
        self._next_s = time.monotonic()
        self._timer.start()
        self.tick()
        self.changed.emit()

    def stop(self) -> None:
        """Submit no more requests and abort the unfinished ones. Idempotent."""
        self._is_running = False
        for request_id in sorted(self._unfinished):
            self._send(Abort(request_id=request_id))
        self.changed.emit()

    def tick(self) -> None:
        if self._is_running:
            self._submit_due(time.monotonic())
        elif not self._unfinished:
            self._timer.stop()
        if self._has_changes:
            self._has_changes = False
            self.changed.emit()

    def _submit_due(self, now_s: float) -> None:
        for _ in range(MAX_NEW_PER_TICK):
            if now_s < self._next_s or not self._may_submit():
                break
            if self._settings.pace is Pace.RATE:
                # Requests that were due more than a second ago are skipped.
                self._next_s = max(self._next_s, now_s - 1) + self._rng.expovariate(self._settings.rate)
            if not self._submit():
                break

    def _may_submit(self) -> bool:
        is_concurrency = self._settings.pace is Pace.CONCURRENCY
        limit = self._settings.concurrency if is_concurrency else MAX_CONCURRENCY
        return len(self._unfinished) < limit

    def _submit(self) -> bool:
        request_id = f"load-{secrets.token_hex(4)}"
        if not self._send(make_request(self._settings, self._prompts, request_id, self._rng)):
            return False
        self._unfinished[request_id] = 0
        self.counts.sent += 1
        self._has_changes = True
        return True

    def _send(self, command: Command) -> bool:
        try:
            sent = self._session.send(command)
        except KvscopeError as error:
            self._stop_with_message(str(error))
            return False
        if not sent:
            self._stop_with_message("the engine accepts no requests now")
        return sent

    def _stop_with_message(self, message: str) -> None:
        self.message = message
        self._is_running = False
        self._has_changes = True

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Tokens | Finished | Refused | Accepted) and reply.request_id in self._unfinished:
                self._on_reply(reply)
            elif isinstance(reply, Failed) and reply.request_id in self._unfinished:
                del self._unfinished[reply.request_id]
                self.counts.lost += 1
                self.message, self._has_changes = reply.reason, True

    def _on_reply(self, reply: Accepted | Refused | Tokens | Finished) -> None:
        self._has_changes = True
        if isinstance(reply, Tokens):
            self.counts.tokens += len(reply.token_ids)
            self._unfinished[reply.request_id] += len(reply.token_ids)
        elif isinstance(reply, Refused):
            del self._unfinished[reply.request_id]
            self.counts.refused += 1
            self.message = f"refused: {reply.reason}"
            self._next_s = time.monotonic() + _PAUSE_AFTER_REFUSAL_S
        elif isinstance(reply, Finished):
            self._count_finished(reply, num_reported=self._unfinished.pop(reply.request_id))

    def _count_finished(self, reply: Finished, num_reported: int) -> None:
        self.counts.tokens += max(reply.usage.completion_tokens - num_reported, 0)  # some engines stream no token ids
        if reply.finish_reason == "abort":
            self.counts.aborted += 1
        elif reply.finish_reason == "error":
            self.counts.refused += 1
            self.message = reply.error
        else:
            self.counts.finished += 1

    def _on_status(self) -> None:
        """Count unfinished requests as lost if the engine has ended or was replaced by another one."""
        epoch = self._session.live_mirror.epoch
        is_other_engine = self._epoch is not None and epoch != self._epoch
        has_ended = is_other_engine or self._session.status.state is SourceState.ENDED
        if has_ended and (self._unfinished or self._is_running):
            self.counts.lost += len(self._unfinished)
            self._unfinished.clear()
            self._stop_with_message(_ENGINE_STOPPED)
        elif is_other_engine and self.message == _ENGINE_STOPPED:  # a new engine started: the message is outdated
            self.message, self._has_changes = "", True
        self._epoch = epoch

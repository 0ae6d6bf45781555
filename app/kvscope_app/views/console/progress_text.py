"""Text on the engine's progress with an unfinished answer. Imports no Qt."""

from __future__ import annotations

from kvscope_app.session.session import Session
from kvscope_app.session.state_text import STATE_TEXTS
from kvscope_app.ui.number_text import seconds
from kvscope_app.views.console.chat_answer import AnswerPhase, ChatAnswer
from kvscope_app.views.requests.phase_text import prefill_progress
from kvscope_app.views.requests.waiting_text import why_waits
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState

_PAUSED = "The engine is paused: choose Resume engine in the Debug menu"
_MIN_WAIT_SHOWN_S = 1.0


def progress_text(answer: ChatAnswer, session: Session) -> str:
    """Return in one line why the first or next token has not arrived yet; "" while tokens arrive."""
    if answer.phase is AnswerPhase.STOPPING:
        return "Stopping…"
    state = session.status.state
    if state is SourceState.PAUSED:
        return _with_elapsed_time(_PAUSED, answer)
    if state is SourceState.STALE:
        return _with_elapsed_time(": ".join(filter(None, [STATE_TEXTS[state], session.status.reason])), answer)
    if answer.phase is AnswerPhase.SENT:
        return _with_elapsed_time("Sent, waiting for the engine", answer)
    slow_step = session.status.reason if state is SourceState.STUCK else ""
    progress = _engine_progress(session.live_mirror, answer)
    return _with_elapsed_time("; ".join(filter(None, [progress, slow_step])), answer)


def _engine_progress(mirror: Mirror, answer: ChatAnswer) -> str:
    number = answer.message.stats.number
    row = mirror.requests.row_of(number) if mirror.epoch == answer.message.stats.epoch else None
    if row is not None:
        if reason := why_waits(mirror, number):
            is_new = mirror.requests.state[row] == RequestState.WAITING
            return f"{'Waiting' if is_new else 'Preempted'}: {reason}"
        if answer.phase is AnswerPhase.QUEUED and mirror.requests.state[row] == RequestState.RUNNING:
            share, computed = prefill_progress(mirror, row)
            return f"Prefill {share}: {computed}"
    return "In the engine, no token yet" if answer.phase is AnswerPhase.QUEUED else ""


def _with_elapsed_time(text: str, answer: ChatAnswer) -> str:
    """Append the time since sending to `text`, if it is over `_MIN_WAIT_SHOWN_S` and no token has arrived."""
    is_timed = text and not answer.message.content and answer.waited_s > _MIN_WAIT_SHOWN_S
    return f"{text}  ·  {seconds(answer.waited_s)}" if is_timed else text

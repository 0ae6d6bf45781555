"""Describes the engine's progress on an unfinished answer in one line. Imports no Qt."""

from __future__ import annotations

from kvscope_app.session.session import Session
from kvscope_app.session.state_text import STATE_TEXTS
from kvscope_app.ui.number_text import seconds
from kvscope_app.views.console.chat_answer import AnswerPhase, ChatAnswer
from kvscope_app.views.requests.phase_text import prefill_so_far
from kvscope_app.views.requests.waiting_text import why_waits
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState

_PAUSED = "The engine is paused: choose Resume engine in the Debug menu"
_WAIT_SHOWN_FROM_S = 1.0


def progress_text(answer: ChatAnswer, session: Session) -> str:
    """Return why there is no token yet, or no further one; "" while the answer is being written."""
    if answer.phase is AnswerPhase.STOPPING:
        return "Stopping…"
    state = session.status.state
    if state is SourceState.PAUSED:
        return _timed(_PAUSED, answer)
    if state is SourceState.STALE:
        return _timed(": ".join(filter(None, [STATE_TEXTS[state], session.status.reason])), answer)
    if answer.phase is AnswerPhase.SENT:
        return _timed("Sent, waiting for the engine", answer)
    slow_step = session.status.reason if state is SourceState.STUCK else ""
    return _timed("; ".join(filter(None, [_in_engine(session.live_mirror, answer), slow_step])), answer)


def _in_engine(mirror: Mirror, answer: ChatAnswer) -> str:
    """Return the mirror's state of the request as text."""
    number = answer.message.stats.number
    row = mirror.requests.row_of(number) if mirror.epoch == answer.message.stats.epoch else None
    if row is not None:
        if waits := why_waits(mirror, number):
            is_new = mirror.requests.state[row] == RequestState.WAITING
            return f"{'Waiting' if is_new else 'Preempted'}: {waits}"
        if answer.phase is AnswerPhase.QUEUED and mirror.requests.state[row] == RequestState.RUNNING:
            share, computed = prefill_so_far(mirror, row)
            return f"Prefill {share}: {computed}"
    return "In the engine, no token yet" if answer.phase is AnswerPhase.QUEUED else ""


def _timed(text: str, answer: ChatAnswer) -> str:
    """Append the time since sending to `text`, if it exceeds `_WAIT_SHOWN_FROM_S` and no token has arrived yet."""
    is_timed = text and not answer.message.content and answer.waited_s > _WAIT_SHOWN_FROM_S
    return f"{text}  ·  {seconds(answer.waited_s)}" if is_timed else text

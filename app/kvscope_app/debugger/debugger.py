"""Sends what a person asks of the engine and receives its answers, each one line: what was done, or why not.

Owns the tags of unanswered commands. Knows neither menus nor who shows an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.session import Session
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Abort, Control, Done, Failed, Intervention, Reply
from kvscope_telemetry.source import SourceState

LEASE_S: Final = 5.0
"""A paused engine goes on when this window was not heard of for so long."""
_OUR_TAGS: Final = 1 << 30
"""Others in the window count from 1."""
Heard = Callable[[str, bool], None]
"""Told the answer, and whether it was done."""


class Debugger(QObject):
    """One for a window's session."""

    answered = Signal(str, bool)
    """An answer in one line, and whether it was done."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.is_ours = False
        """Whether the engine is paused because this window asked for it."""
        self._stood_still = False
        self._next_tag = _OUR_TAGS
        self._asked: dict[int | str, tuple[str, Heard | None]] = {}
        session.replies.connect(self._read)
        session.status_changed.connect(self._look)

    @property
    def paused_by(self) -> str:
        """Who paused the engine, for people; empty when nobody did."""
        if self.session.status.state is not SourceState.PAUSED:
            return ""
        return "you" if self.is_ours else self.session.status.reason.removeprefix("by ") or "somebody"

    def control(self, action: Literal["pause", "resume", "step", "reset_prefix_cache"], num_steps: int = 1) -> None:
        """Pause, step, resume, or empty the prefix cache."""
        lease_s = LEASE_S if action == "pause" else 0.0
        done = {"pause": "engine paused", "resume": "engine resumed", "step": "one step run"}
        words = done.get(action, "prefix cache reset")
        self.ask(Control, done=words, action=action, lease_s=lease_s, num_steps=num_steps, heard=self._note(action))

    def ask(
        self, kind: type[Control | Intervention], *, done: str = "done", heard: Heard | None = None, **fields: Any
    ) -> None:
        """Send a command of `kind` with `fields`; `done` are the words for an engine that says no more than that."""
        self._next_tag += 1
        try:
            sent = self.session.send(kind(tag=self._next_tag, **fields))
        except KvscopeError as error:
            self._tell(str(error), False, heard)
            return
        if sent:
            self._asked[self._next_tag] = (done, heard)
        else:
            self._tell("no engine is attached", False, heard)

    def abort(self, number: int, request_id: str) -> None:
        """Abort a request, whoever submitted it."""
        if self.session.send(Abort(request_id=request_id, anyones=True)):
            self._asked[request_id] = (f"request #{number} was aborted", None)

    def _note(self, action: str) -> Heard | None:
        """What else follows from an answer to `action`."""
        if action not in ("pause", "resume"):
            return None

        def heard(_: str, was_done: bool) -> None:
            self.is_ours = was_done and action == "pause"
            self.session.ask_status()  # its answer is not waited for: the next heartbeat says it too

        return heard

    def _read(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Done | Failed):
                asked = self._asked.pop(reply.request_id or reply.tag, None)
                if asked is not None:
                    words = reply.reason if isinstance(reply, Failed) else reply.what or asked[0]
                    self._tell(words, isinstance(reply, Done), asked[1])

    def _tell(self, words: str, was_done: bool, heard: Heard | None) -> None:
        if heard is not None:
            heard(sentence(words), was_done)
        self.answered.emit(sentence(words), was_done)

    def _look(self) -> None:
        """Our pause is over when the engine stood still and goes on: it seems live for a while after the answer."""
        state = self.session.status.state
        if self._stood_still and state is SourceState.LIVE:
            self.is_ours = False
        self._stood_still = state is SourceState.PAUSED


def sentence(words: str) -> str:
    """Return the text with a capital first letter, unless it begins with one of the engine's own names."""
    return words if "_" in words.split(" ", 1)[0] else words[:1].upper() + words[1:]

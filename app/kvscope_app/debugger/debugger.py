"""Sends the user's commands to the engine and receives its answers: one line that says what was done, or why not.

Owns the tags of unanswered commands. Must not depend on the menus and widgets that show an answer.
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
"""Lease of a pause in seconds: an engine that lost contact with the window resumes by itself after this time."""
_FIRST_TAG: Final = 1 << 30
"""First tag of the debugger's commands. Other commands of the window are tagged from 1."""
AnswerCallback = Callable[[str, bool], None]
"""Called with the text of a command's reply and whether the command succeeded."""


class Debugger(QObject):
    answered = Signal(str, bool)
    """Emitted with the text (one line) of a command's reply and whether the command succeeded."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.is_paused_by_us = False
        self._was_paused = False
        self._next_tag = _FIRST_TAG
        self._pending: dict[int | str, tuple[str, AnswerCallback | None]] = {}
        session.replies.connect(self._on_replies)
        session.status_changed.connect(self._on_status)

    @property
    def paused_by(self) -> str:
        """Client that paused the engine: "you", the client's label, or "another client" if unknown; "" if the engine
        is not paused.
        """
        if self.session.status.state is not SourceState.PAUSED:
            return ""
        return "you" if self.is_paused_by_us else self.session.status.reason.removeprefix("by ") or "another client"

    def control(self, action: Literal["pause", "resume", "step", "reset_prefix_cache"], num_steps: int = 1) -> None:
        """Pause, step or resume the engine, or reset its prefix cache. `num_steps` applies to "step" only."""
        lease_s = LEASE_S if action == "pause" else 0.0
        done = {"pause": "engine paused", "resume": "engine resumed", "step": "one step run"}
        text = done.get(action, "prefix cache reset")
        self.send_command(
            Control,
            done=text,
            action=action,
            lease_s=lease_s,
            num_steps=num_steps,
            on_answer=self._ownership_callback(action),
        )

    def send_command(
        self,
        kind: type[Control | Intervention],
        *,
        done: str = "done",
        on_answer: AnswerCallback | None = None,
        **fields: Any,
    ) -> None:
        """Send a command to the engine.

        Args:
            kind: Class of the command.
            done: Answer to show if the engine reports success without a text.
            on_answer: Called with the answer, before `answered` is emitted.
            fields: Fields of the command, except its tag.
        """
        self._next_tag += 1
        try:
            sent = self.session.send(kind(tag=self._next_tag, **fields))
        except KvscopeError as error:
            self._report(str(error), False, on_answer)
            return
        if sent:
            self._pending[self._next_tag] = (done, on_answer)
        else:
            self._report("no engine is attached", False, on_answer)

    def abort(self, number: int, request_id: str) -> None:
        """Abort a request, whichever client sent it."""
        if self.session.send(Abort(request_id=request_id, anyones=True)):
            self._pending[request_id] = (f"request #{number} was aborted", None)

    def _ownership_callback(self, action: str) -> AnswerCallback | None:
        """Return the callback that updates `is_paused_by_us` after a pause or resume; None for other actions."""
        if action not in ("pause", "resume"):
            return None

        def on_answer(_: str, was_done: bool) -> None:
            self.is_paused_by_us = was_done and action == "pause"
            self.session.request_status()  # no need to wait for the answer: the next heartbeat has the state too

        return on_answer

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Done | Failed):
                pending = self._pending.pop(reply.request_id or reply.tag, None)
                if pending is not None:
                    text = reply.reason if isinstance(reply, Failed) else reply.what or pending[0]
                    self._report(text, isinstance(reply, Done), pending[1])

    def _report(self, text: str, was_done: bool, on_answer: AnswerCallback | None) -> None:
        if on_answer is not None:
            on_answer(sentence(text), was_done)
        self.answered.emit(sentence(text), was_done)

    def _on_status(self) -> None:
        """Clear `is_paused_by_us` when the engine's state changes from paused to live.

        The current state alone is not enough, because it stays live for a while after the engine confirmed a pause.
        """
        state = self.session.status.state
        if self._was_paused and state is SourceState.LIVE:
            self.is_paused_by_us = False
        self._was_paused = state is SourceState.PAUSED


def sentence(text: str) -> str:
    """Return `text` with a capital first letter, unless its first word is an identifier such as `max_num_seqs`."""
    return text if "_" in text.split(" ", 1)[0] else text[:1].upper() + text[1:]

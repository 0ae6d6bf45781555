"""Plans worked out by `kvscope-engine plan --lines`. Of several questions the newest is answered.

Owns what was asked; the child and its lines are `LineChild`'s. The desktop knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.own_engine.line_child import LineChild, complaint, engine_command
from kvscope_telemetry.messages.memory_plan import PlanAnswer

NOT_INSTALLED: Final = "Planning needs the engine, which is not installed: pip install 'kvscope[engine]'."
MAX_ANSWER_BYTES: Final = 1 << 20
_KEPT_MS: Final = 300_000

Question = tuple[str, ...]
"""Options of `kvscope-engine plan`."""


class PlanProcess(QObject):
    """Not started before the first question, which takes seconds, since the child imports torch; kept for some minutes
    after the last one."""

    answered = Signal(object)
    """A `PlanAnswer` to the newest question: the first part, then all of it."""
    failed = Signal(str)
    """Why there is none to the newest question."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """`command` replaces the engine's."""
        super().__init__(parent)
        self.child = LineChild(command or engine_command("plan", "--lines"), MAX_ANSWER_BYTES, self)
        self.child.line_came.connect(self._take)
        self.child.failed.connect(self._on_failure)
        self._is_asked = False
        self._next: Question | None = None
        self._idle = QTimer(self, singleShot=True, interval=_KEPT_MS)
        self._idle.timeout.connect(self.close)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is to come."""
        return self._is_asked

    def ask(self, question: Question) -> None:
        """Work out `question`; one that is being worked out is answered to nobody."""
        self._idle.stop()
        if self._is_asked:
            self._next = question
        elif not self.child.is_installed:
            self.failed.emit(NOT_INSTALLED)
        else:
            self._is_asked = self.child.send(question)

    def rest(self) -> None:
        """Nobody asks for now: what is still being worked out is told to nobody, and the child ends after a while."""
        if self._is_asked:
            self._next = ()
        self._idle.start()

    def close(self) -> None:
        """End the child; the next question starts another."""
        self._idle.stop()
        self._is_asked, self._next = False, None
        self.child.close()

    def _take(self, line: bytes) -> None:
        answer, failure = _read(line)
        if self._next is None:
            if answer is None:
                self.failed.emit(failure)
            else:
                self.answered.emit(answer)
        if answer is None or not answer.is_first:
            self._is_asked = False
            question, self._next = self._next, None
            if question:  # what came was the answer to an older one
                self.ask(question)

    def _on_failure(self, reason: str) -> None:
        self._is_asked, self._next = False, None
        self._idle.stop()
        self.failed.emit(f"Planning stopped: {reason}.")


def _read(line: bytes) -> tuple[PlanAnswer | None, str]:
    """The answer, or why there is none."""
    try:
        return msgspec.json.decode(line, type=PlanAnswer), ""
    except msgspec.MsgspecError as error:
        return None, complaint(line) or f"The answer cannot be read: {error}."

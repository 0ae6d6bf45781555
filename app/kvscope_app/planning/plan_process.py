"""Plans worked out by `kvscope-engine plan --lines`. Of several questions the newest is answered.

Owns what was asked; the child and its lines are `LineChild`'s. The desktop knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, Signal

from kvscope_app.own_engine.line_child import LineChild, complaint, engine_command
from kvscope_telemetry.messages.plan import PlanAnswer

NOT_INSTALLED: Final = "Planning needs the engine, which is not installed here: pip install 'kvscope[engine]'."
MAX_ANSWER_BYTES: Final = 1 << 20

Question = tuple[str, ...]
"""Options of `kvscope-engine plan`."""


class PlanProcess(QObject):
    """Not started before the first question; the first takes seconds, since the child imports torch."""

    answered = Signal(object)
    """A `PlanAnswer`, to the newest question."""
    failed = Signal(str)
    """Why there is none to the newest question."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """`command` replaces the engine's."""
        super().__init__(parent)
        self._child = LineChild(command or engine_command("plan", "--lines"), MAX_ANSWER_BYTES, self)
        self._child.line_came.connect(self._take)
        self._child.failed.connect(self._on_failure)
        self._is_asked = False
        self._next: Question | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is to come."""
        return self._is_asked

    def ask(self, question: Question) -> None:
        """Work out `question`; one that is being worked out is answered to nobody."""
        if self._is_asked:
            self._next = question
        elif not self._child.is_installed:
            self.failed.emit(NOT_INSTALLED)
        else:
            self._is_asked = self._child.send(question)

    def close(self) -> None:
        """End the child; the next question starts another."""
        self._is_asked, self._next = False, None
        self._child.close()

    def _take(self, line: bytes) -> None:
        self._is_asked = False
        question, self._next = self._next, None
        if question is not None:  # what came is the answer to an older one
            self.ask(question)
            return
        try:
            self.answered.emit(msgspec.json.decode(line, type=PlanAnswer))
        except msgspec.MsgspecError as error:
            self.failed.emit(complaint(line) or f"The answer cannot be read: {error}.")

    def _on_failure(self, reason: str) -> None:
        self._is_asked, self._next = False, None
        self.failed.emit(f"Planning stopped: {reason}.")

"""Computes memory plans with `kvscope-engine plan --lines`. If several are requested, only the newest is answered.

Owns the pending request; `LineProcess` owns the process and its lines. A process is used because the app does not
import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.engine_launcher.line_process import LineProcess, complaint, engine_command
from kvscope_telemetry.messages.memory_plan import PlanAnswer

NOT_INSTALLED: Final = "Planning needs the engine, which is not installed: pip install 'kvscope[engine]'."
MAX_ANSWER_BYTES: Final = 1 << 20
_KEPT_MS: Final = 300_000

Question = tuple[str, ...]
"""Options of `kvscope-engine plan`."""


class PlanProcess(QObject):
    """Runs the planner in a child process.

    The child starts with the first request, which takes seconds because it imports torch. It ends some minutes after
    the last request.
    """

    answered = Signal(object)
    """Emitted with a `PlanAnswer` to the newest request: first a partial one, then the complete one."""
    failed = Signal(str)
    """Emitted with the reason why the newest request has no answer."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """`command` replaces the engine's command."""
        super().__init__(parent)
        self.child = LineProcess(command or engine_command("plan", "--lines"), MAX_ANSWER_BYTES, self)
        self.child.line_came.connect(self._on_line)
        self.child.failed.connect(self._on_failure)
        self._is_asked = False
        self._next: Question | None = None
        self._idle = QTimer(self, singleShot=True, interval=_KEPT_MS)
        self._idle.timeout.connect(self.close)

    @property
    def is_busy(self) -> bool:
        return self._is_asked

    def request(self, question: Question) -> None:
        """Request a plan. An answer to an earlier request that is still pending is discarded."""
        self._idle.stop()
        if self._is_asked:
            self._next = question
        elif not self.child.is_installed:
            self.failed.emit(NOT_INSTALLED)
        else:
            self._is_asked = self.child.send(question)

    def cancel(self) -> None:
        """Discard pending answers, and end the child if no request follows within `_KEPT_MS`."""
        if self._is_asked:
            self._next = ()
        self._idle.start()

    def close(self) -> None:
        """End the child. The next request starts another."""
        self._idle.stop()
        self._is_asked, self._next = False, None
        self.child.close()

    def _on_line(self, line: bytes) -> None:
        answer, failure = _parse(line)
        if self._next is None:
            if answer is None:
                self.failed.emit(failure)
            else:
                self.answered.emit(answer)
        if answer is None or not answer.is_first:
            self._is_asked = False
            question, self._next = self._next, None
            if question:  # the answer that arrived was to an older request
                self.request(question)

    def _on_failure(self, reason: str) -> None:
        self._is_asked, self._next = False, None
        self._idle.stop()
        self.failed.emit(f"Planning stopped: {reason}.")


def _parse(line: bytes) -> tuple[PlanAnswer | None, str]:
    """Return the answer, or else None and why there is none."""
    try:
        return msgspec.json.decode(line, type=PlanAnswer), ""
    except msgspec.MsgspecError as error:
        return None, complaint(line) or f"The answer cannot be read: {error}."

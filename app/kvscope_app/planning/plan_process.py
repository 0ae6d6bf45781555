"""Computes memory plans with `kvscope-engine plan --lines`. If several are requested, only the newest is answered.

Owns the pending request; `LineProcess` owns the process and its lines. A process is used because the app does not
import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.engine_launcher.line_process import LineProcess, complaint_error, engine_command
from kvscope_telemetry.messages.memory_plan import PlanAnswer

NOT_INSTALLED: Final = "Planning needs the engine, which is not installed: pip install 'kvscope[engine]'."
MAX_ANSWER_BYTES: Final = 1 << 20
_IDLE_TIMEOUT_MS: Final = 300_000

Question = tuple[str, ...]
"""Command-line options of `kvscope-engine plan`."""


class PlanProcess(QObject):
    """Runs the planner in a child process.

    The first request starts the child, which takes seconds because it imports torch. The child ends some minutes after
    the last request.
    """

    answered = Signal(object)
    """Emitted with the `PlanAnswer` to the newest request: first a partial one, then the complete one."""
    failed = Signal(str)
    """Emitted with the reason when the newest request fails."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """Create the planner without a child process. `command` replaces the engine's command line."""
        super().__init__(parent)
        self.child = LineProcess(command or engine_command("plan", "--lines"), MAX_ANSWER_BYTES, self)
        self.child.line_received.connect(self._on_line)
        self.child.failed.connect(self._on_failure)
        self._is_busy = False
        self._next_question: Question | None = None
        self._idle_timer = QTimer(self, singleShot=True, interval=_IDLE_TIMEOUT_MS)
        self._idle_timer.timeout.connect(self.close)

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def request(self, question: Question) -> None:
        """Request a plan. The answer to an earlier, pending request is discarded."""
        self._idle_timer.stop()
        if self._is_busy:
            self._next_question = question
        elif not self.child.is_installed:
            self.failed.emit(NOT_INSTALLED)
        else:
            self._is_busy = self.child.send(question)

    def cancel(self) -> None:
        """Discard pending answers, and end the child if no request follows within `_IDLE_TIMEOUT_MS`."""
        if self._is_busy:
            self._next_question = ()
        self._idle_timer.start()

    def close(self) -> None:
        """End the child. The next request starts a new one."""
        self._idle_timer.stop()
        self._is_busy, self._next_question = False, None
        self.child.close()

    def _on_line(self, line: bytes) -> None:
        answer, failure = _parse(line)
        if self._next_question is None:
            if answer is None:
                self.failed.emit(failure)
            else:
                self.answered.emit(answer)
        if answer is None or not answer.is_first:
            self._is_busy = False
            question, self._next_question = self._next_question, None
            if question:  # the answer that arrived was to an older request
                self.request(question)

    def _on_failure(self, reason: str) -> None:
        self._is_busy, self._next_question = False, None
        self._idle_timer.stop()
        self.failed.emit(f"Planning stopped: {reason}.")


def _parse(line: bytes) -> tuple[PlanAnswer | None, str]:
    """Parse a line of the planner's output. Returns (answer, ""), or (None, reason) if the line has no answer."""
    try:
        return msgspec.json.decode(line, type=PlanAnswer), ""
    except msgspec.MsgspecError as error:
        return None, complaint_error(line) or f"The answer cannot be read: {error}."

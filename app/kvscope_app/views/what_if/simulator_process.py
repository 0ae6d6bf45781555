"""Runs comparisons of allocators in a child process, `kvscope-engine what-if`, with at most one pending question.

Owns the setup and the question that are sent to the child; `LineProcess` owns the child process and its input and
output lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, Signal

from kvscope_app.engine_launcher.line_process import LineProcess, complaint_error, engine_command
from kvscope_telemetry.messages.what_if import Memory, WhatIfAnswer

NOT_INSTALLED: Final = "Comparing allocators needs the engine, which is not installed: pip install 'kvscope[engine]'."
_MAX_ANSWER_BYTES: Final = 4 << 20

Rows = list[list[int]]
"""Requests in a question: one list per running request, with the fields of `Running` in their order."""


class WhatIfSimulator(QObject):
    """Sends questions to a child process, which is started with the first question. The child does not need torch."""

    answered = Signal(object)
    failed = Signal(str)
    """Emitted with the reason if a question will not be answered. The next question sends the setup again."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """Create the simulator. If `command` is given, it is started instead of `kvscope-engine what-if`."""
        super().__init__(parent)
        self.child = LineProcess(command or engine_command("what-if"), _MAX_ANSWER_BYTES, self)
        self.child.line_received.connect(self._on_line)
        self.child.failed.connect(self._on_failure)
        self._current_setup: tuple[int | None, Memory] | None = None
        self._decoder = msgspec.json.Decoder(WhatIfAnswer)
        self.is_busy = False

    @property
    def is_running(self) -> bool:
        return self.child.is_running

    def ask(self, epoch: int | None, memory: Memory, rows: Rows) -> None:
        """Ask how the requests in `rows` would be placed in `memory`. Must not be called while `is_busy`.

        If the epoch or the memory differs from the last question, the child's state is reset.
        """
        assert not self.is_busy, "one question at a time"
        if not self.child.is_installed:
            self.failed.emit(NOT_INSTALLED)
            return
        if (epoch, memory) != self._current_setup:
            if not self.child.send({"setup": memory}):
                return
            self._current_setup = epoch, memory
        self.is_busy = self.child.send({"now": rows})

    def close(self) -> None:
        """End the child process. The next question starts another one."""
        self._reset()
        self.child.close()

    def _on_line(self, line: bytes) -> None:
        self.is_busy = False
        try:
            answer = self._decoder.decode(line)
        except msgspec.MsgspecError as error:
            self.child.fail(complaint_error(line) or f"its answer cannot be read: {error}")
            return
        self.answered.emit(answer)

    def _on_failure(self, reason: str) -> None:
        self._reset()
        self.failed.emit(f"The comparison stopped: {reason}.")

    def _reset(self) -> None:
        self._current_setup = None
        self.is_busy = False

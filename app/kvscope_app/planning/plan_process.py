"""The process that works plans out: `kvscope-engine plan --lines`, a child that ends with its standard input.

Owns the child and the lines to and from it. Of several questions the newest is answered; the desktop knows no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QProcess, Signal

from kvscope_telemetry.messages.plan import PlanAnswer
from kvscope_telemetry.messages.what_if import Complaint

NOT_INSTALLED: Final = "Planning needs the engine, which is not installed here: pip install 'kvscope[engine]'."
MAX_ANSWER_BYTES: Final = 1 << 20
_END_AFTER_MS: Final = 500
_KILLED_AFTER_MS: Final = 10_000

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
        self._command = command
        self._process: QProcess | None = None
        self._received = bytearray()
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
            return
        process = self._process or self._start()
        if process is not None:
            self._is_asked = True
            process.write(msgspec.json.encode(question) + b"\n")

    def close(self) -> None:
        """End the child; the next question starts another."""
        process, self._process = self._process, None
        self._received.clear()
        self._is_asked, self._next = False, None
        if process is None:
            return
        for signal in (process.readyReadStandardOutput, process.errorOccurred, process.finished):
            signal.disconnect()
        process.closeWriteChannel()
        if process.state() is not QProcess.ProcessState.NotRunning and not process.waitForFinished(_END_AFTER_MS):
            process.kill()
            process.waitForFinished(_KILLED_AFTER_MS)
        process.deleteLater()

    def _start(self) -> QProcess | None:
        command = self._command or plan_command()
        if command is None:
            self.failed.emit(NOT_INSTALLED)
            return None
        process = self._process = QProcess(self)
        process.readyReadStandardOutput.connect(self._read)
        process.errorOccurred.connect(self._on_error)
        process.finished.connect(self._on_end)
        process.start(command[0], list(command[1:]))
        return process if self._process is process else None  # it may have failed at once

    def _read(self) -> None:
        assert self._process is not None, "output of a child that is not there"
        self._received += self._process.readAllStandardOutput().data()
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > MAX_ANSWER_BYTES:
            self._fail("Planning stopped: its answer is too long.")
            return
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        self._is_asked = False
        question, self._next = self._next, None
        if question is not None:  # what came is the answer to an older one
            self.ask(question)
            return
        try:
            self.answered.emit(msgspec.json.decode(line, type=PlanAnswer))
        except msgspec.MsgspecError:
            self.failed.emit(_complaint(line))

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart and self._process is not None:
            self._fail(f"Planning cannot be started: {self._process.errorString()}.")

    def _on_end(self, code: int, status: QProcess.ExitStatus) -> None:
        assert self._process is not None, "the end of a child that is not there"
        said = bytes(self._process.readAllStandardError().data()).decode("utf-8", "replace").strip().splitlines()
        reason = said[-1].removeprefix("kvscope-engine: ")[:300] if said else f"it ended with exit code {code}"
        self._fail(f"Planning stopped: {reason}.")

    def _fail(self, reason: str) -> None:
        self.close()
        self.failed.emit(reason)


def plan_command() -> list[str] | None:
    """The engine's command; None where the engine is not installed."""
    if find_spec("kvscope_engine") is None:
        return None
    return [sys.executable, "-m", "kvscope_engine.cli.main", "plan", "--lines"]


def _complaint(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=Complaint).error
    except msgspec.MsgspecError as error:
        return f"The answer cannot be read: {error}."

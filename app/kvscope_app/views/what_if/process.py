"""The process that works it out: `kvscope-engine what-if`, a child that ends with its standard input.

Owns the child and the lines to and from it. At most one question is open; never waits but when it is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QProcess, Signal

from kvscope_telemetry.messages.what_if import Answer, Complaint, Memory

NOT_INSTALLED: Final = (
    "Comparing policies needs the engine, which is not installed here: pip install 'kvscope[engine]'."
)
_MAX_ANSWER_BYTES: Final = 4 << 20
_END_AFTER_MS: Final = 500
_KILLED_AFTER_MS: Final = 10_000
"""Milliseconds do, unless the machine is busy; but one that is let go while it runs is complained about by Qt."""

Rows = list[list[int]]
"""A `Running` each."""


class WhatIfProcess(QObject):
    """Not started before the first question."""

    answered = Signal(object)
    """An `Answer`."""
    failed = Signal(str)
    """There will be no answer, for this reason; the next question starts anew."""

    def __init__(self, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """`command` replaces the engine's."""
        super().__init__(parent)
        self._command = command
        self._process: QProcess | None = None
        self._set_up: tuple[int | None, Memory] | None = None
        self._received = bytearray()
        self._decoder = msgspec.json.Decoder(Answer)
        self.is_busy = False
        """Whether a question is open."""

    @property
    def is_running(self) -> bool:
        """Whether the child is there."""
        return self._process is not None and self._process.state() is not QProcess.ProcessState.NotRunning

    def ask(self, epoch: int | None, memory: Memory, rows: Rows) -> None:
        """What would become of these requests in this memory? Only while not `is_busy`.

        With another epoch or memory all begins anew.
        """
        assert not self.is_busy, "one question at a time"
        process = self._process or self._start()
        if process is None:
            return
        if (epoch, memory) != self._set_up:
            process.write(msgspec.json.encode({"setup": memory}) + b"\n")
            self._set_up = epoch, memory
        process.write(msgspec.json.encode({"now": rows}) + b"\n")
        self.is_busy = True

    def close(self) -> None:
        """End the child; the next question starts another."""
        process, self._process = self._process, None
        self._forget()
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
        command = self._command or what_if_command()
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
        if len(rest) > _MAX_ANSWER_BYTES:
            self._fail("its answer is too long")
            return
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        self.is_busy = False
        try:
            answer = self._decoder.decode(line)
        except msgspec.MsgspecError as error:
            self._fail(_complaint(line) or f"its answer cannot be read: {error}")
            return
        self.answered.emit(answer)

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart and self._process is not None:
            self._fail(f"it cannot be started: {self._process.errorString()}")

    def _on_end(self, code: int, status: QProcess.ExitStatus) -> None:
        assert self._process is not None, "the end of a child that is not there"
        said = bytes(self._process.readAllStandardError().data()).decode("utf-8", "replace").strip().splitlines()
        self._fail(said[-1].removeprefix("kvscope-engine: ")[:300] if said else f"it ended with exit code {code}")

    def _fail(self, reason: str) -> None:
        self.close()
        self.failed.emit(f"The comparison stopped: {reason}.")

    def _forget(self) -> None:
        self._set_up = None
        self._received.clear()
        self.is_busy = False


def what_if_command() -> list[str] | None:
    """The engine's command; None where the engine is not installed. It needs no torch."""
    if find_spec("kvscope_engine") is None:
        return None
    return [sys.executable, "-m", "kvscope_engine.cli.main", "what-if"]


def _complaint(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=Complaint).error
    except msgspec.MsgspecError:
        return ""

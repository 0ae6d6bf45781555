"""A child process of the engine's commands that answers each line with a line, and ends when its standard input closes.

Owns the child and the lines to and from it. What a line says, and when the next may be asked, it must not know;
never waits but when it is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QProcess, Signal

from kvscope_telemetry.messages.what_if import Complaint

_END_AFTER_MS: Final = 500
_KILLED_AFTER_MS: Final = 10_000
"""Milliseconds do, unless the machine is busy; but one that is let go while it runs is complained about by Qt."""


class LineChild(QObject):
    """Starts the child with the first line; after a failure the next line starts another."""

    line_came = Signal(bytes)
    """Without its end."""
    failed = Signal(str)
    """No answer will come, for this reason, in words that end a sentence; the child is gone."""

    def __init__(self, command: Sequence[str] | None, max_line_bytes: int, parent: QObject | None = None) -> None:
        """`command` None: it is not installed, so that `send` gives False."""
        super().__init__(parent)
        self.command = command
        self._max_line_bytes = max_line_bytes
        self.process: QProcess | None = None
        self._received = bytearray()

    @property
    def is_running(self) -> bool:
        """Whether the child is there."""
        return self.process is not None and self.process.state() is not QProcess.ProcessState.NotRunning

    @property
    def is_installed(self) -> bool:
        """Whether there is a command to run."""
        return self.command is not None

    def send(self, message: object) -> bool:
        """Send `message` as a line of JSON; returns whether there is a child that may answer it."""
        process = self.process or self._start()
        if process is None:
            return False
        process.write(msgspec.json.encode(message) + b"\n")
        return True

    def close(self) -> None:
        """End the child; the next line starts another."""
        process, self.process = self.process, None
        self._received.clear()
        if process is None:
            return
        for signal in (process.readyReadStandardOutput, process.errorOccurred, process.finished):
            signal.disconnect()
        process.closeWriteChannel()
        if process.state() is not QProcess.ProcessState.NotRunning and not process.waitForFinished(_END_AFTER_MS):
            process.kill()
            process.waitForFinished(_KILLED_AFTER_MS)
        process.deleteLater()

    def fail(self, reason: str) -> None:
        """End the child for `reason`."""
        self.close()
        self.failed.emit(reason)

    def _start(self) -> QProcess | None:
        if self.command is None:
            return None
        process = self.process = QProcess(self)
        process.readyReadStandardOutput.connect(self._read)
        process.errorOccurred.connect(self._on_error)
        process.finished.connect(self._on_end)
        process.start(self.command[0], list(self.command[1:]))
        return process if self.process is process else None  # it may have failed at once

    def _read(self) -> None:
        assert self.process is not None, "output of a child that is not there"
        self._received += self.process.readAllStandardOutput().data()
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > self._max_line_bytes:
            self.fail("its answer is too long")
            return
        for line in lines:
            self.line_came.emit(line)

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart and self.process is not None:
            self.fail(f"it cannot be started: {self.process.errorString()}")

    def _on_end(self, code: int, status: QProcess.ExitStatus) -> None:
        assert self.process is not None, "the end of a child that is not there"
        said = bytes(self.process.readAllStandardError().data()).decode("utf-8", "replace").strip().splitlines()
        self.fail(said[-1].removeprefix("kvscope-engine: ")[:300] if said else f"it ended with exit code {code}")


def engine_command(*words: str) -> list[str] | None:
    """`kvscope-engine WORDS`; None where the engine is not installed."""
    if find_spec("kvscope_engine") is None:
        return None
    return [sys.executable, "-m", "kvscope_engine.cli.main", *words]


def complaint(line: bytes) -> str:
    """What a line that is no answer complains about; empty when it is no complaint either."""
    try:
        return msgspec.json.decode(line, type=Complaint).error
    except msgspec.MsgspecError:
        return ""

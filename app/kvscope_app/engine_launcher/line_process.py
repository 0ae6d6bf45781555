"""Child process that runs a command of the engine and answers each input line with output lines.

Owns the child process, which ends when its standard input is closed. Callers interpret the lines and decide when to
send the next one. Only `close` blocks.
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
"""Maximum milliseconds to wait after SIGKILL; a few suffice unless the machine is busy.

A QProcess must not be deleted while its process runs, as Qt prints a warning then.
"""


class LineProcess(QObject):
    """Sends lines to a child process, which it starts when the first line is sent.

    After a failure or `close`, the next `send` starts a new child.
    """

    line_received = Signal(bytes)
    """Emitted with each line of output, without its line end."""
    failed = Signal(str)
    """Emitted with a reason such as "it ended with exit code 1" when the child ended without answering."""

    def __init__(self, command: Sequence[str] | None, max_line_bytes: int, parent: QObject | None = None) -> None:
        """Create an object without a child process, which `send` starts.

        Args:
            command: Command line; None if the command is not installed, in which case `send` returns False.
            max_line_bytes: A longer line of output is a failure.
            parent: Qt parent.
        """
        super().__init__(parent)
        self.command = command
        self._max_line_bytes = max_line_bytes
        self.process: QProcess | None = None
        self._received = bytearray()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.state() is not QProcess.ProcessState.NotRunning

    @property
    def is_installed(self) -> bool:
        return self.command is not None

    def send(self, message: object) -> bool:
        """Send `message` as a line of JSON. Returns False if no child could be started."""
        process = self.process or self._start()
        if process is None:
            return False
        process.write(msgspec.json.encode(message) + b"\n")
        return True

    def close(self) -> None:
        """End the child; kill it if it does not end in time. The next `send` starts a new child."""
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
        self.close()
        self.failed.emit(reason)

    def _start(self) -> QProcess | None:
        if self.command is None:
            return None
        process = self.process = QProcess(self)
        process.readyReadStandardOutput.connect(self._read_lines)
        process.errorOccurred.connect(self._on_error)
        process.finished.connect(self._on_end)
        process.start(self.command[0], list(self.command[1:]))
        return process if self.process is process else None  # start() may already have failed

    def _read_lines(self) -> None:
        assert self.process is not None, "output of a child that is not there"
        self._received += self.process.readAllStandardOutput().data()
        *lines, incomplete_line = bytes(self._received).split(b"\n")
        self._received = bytearray(incomplete_line)
        if len(incomplete_line) > self._max_line_bytes:
            self.fail("its answer is too long")
            return
        for line in lines:
            self.line_received.emit(line)

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart and self.process is not None:
            self.fail(f"it cannot be started: {self.process.errorString()}")

    def _on_end(self, code: int, status: QProcess.ExitStatus) -> None:
        assert self.process is not None, "the end of a child that is not there"
        error_lines = bytes(self.process.readAllStandardError().data()).decode("utf-8", "replace").strip().splitlines()
        self.fail(
            error_lines[-1].removeprefix("kvscope-engine: ")[:300] if error_lines else f"it ended with exit code {code}"
        )


def engine_command(*arguments: str) -> list[str] | None:
    """Return the command line of `kvscope-engine ARGUMENTS`, or None if the engine is not installed."""
    if find_spec("kvscope_engine") is None:
        return None
    return [sys.executable, "-m", "kvscope_engine.cli.main", *arguments]


def complaint_error(line: bytes) -> str:
    """Return the error text of a line that is a `Complaint`; empty for any other line."""
    try:
        return msgspec.json.decode(line, type=Complaint).error
    except msgspec.MsgspecError:
        return ""

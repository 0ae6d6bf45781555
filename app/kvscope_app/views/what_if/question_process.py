"""Answers questions about past requests in a child process, `kvscope-engine what-if`, one at a time.

Owns the reading thread that makes the recent history readable, and the child, which ends after each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from PySide6.QtCore import QObject, Signal

from kvscope_app.engine_launcher.line_process import LineProcess, complaint_error, engine_command
from kvscope_app.session.recording.recording_reader import RecordingReader
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.what_if_question import WhatIfComparison, WhatIfProgress, WhatIfQuestion

NOT_INSTALLED: Final = "Simulations need the engine, which is not installed: pip install 'kvscope[engine]'."
NO_HISTORY: Final = "Earlier requests are not known, because recent history is off."
_MAX_ANSWER_BYTES: Final = 1 << 20


class QuestionProcess(QObject):
    progressed = Signal(float)
    """Emitted with the share done, 0 to 1."""
    answered = Signal(object)
    failed = Signal(str)

    def __init__(self, session: Session, parent: QObject | None = None, command: Sequence[str] | None = None) -> None:
        """Create the object without a process. If `command` is given, it is started instead of `kvscope-engine
        what-if`.
        """
        super().__init__(parent)
        self.child = LineProcess(command or engine_command("what-if"), _MAX_ANSWER_BYTES, self)
        self.child.line_received.connect(self._on_line)
        self.child.failed.connect(self._on_failure)
        self._reader: RecordingReader[str] = RecordingReader(session, "kvscope-what-if", self)
        self._reader.finished.connect(self._on_path)
        self._options: list[str] = []
        self._decoder = msgspec.json.Decoder(WhatIfComparison)
        self._progress_decoder = msgspec.json.Decoder(WhatIfProgress)
        self.is_busy = False

    def ask(self, options: Sequence[str]) -> None:
        """Ask what options of `kvscope-engine simulate` would have changed. Must not be called while `is_busy`."""
        assert not self.is_busy, "one question at a time"
        if not self.child.is_installed:
            self.failed.emit(NOT_INSTALLED)
            return
        self._options = list(options)
        self.is_busy = self._reader.start(lambda recording, _: str(recording.path))
        if not self.is_busy:
            self.failed.emit(NO_HISTORY)

    def close(self) -> None:
        """Cancel the question, if any, and end the child."""
        self.is_busy = False
        self._reader.close()
        self.child.close()

    def _on_path(self) -> None:
        path = self._reader.result
        if path is None:
            self._fail(self._reader.failure or NO_HISTORY)
        elif not self.child.send({"question": WhatIfQuestion(path, self._options)}):
            self.is_busy = False  # `failed` was emitted

    def _on_line(self, line: bytes) -> None:
        try:
            self.progressed.emit(self._progress_decoder.decode(line).share_done)
            return
        except msgspec.MsgspecError:
            pass
        try:
            answer = self._decoder.decode(line)
        except msgspec.MsgspecError as error:
            reason = complaint_error(line).removeprefix("line 1: ")
            self._fail(reason or f"its answer cannot be read: {error}")
            return
        self.close()
        self.answered.emit(answer)

    def _on_failure(self, reason: str) -> None:
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.close()
        self.failed.emit(f"The simulation stopped: {reason.rstrip('.')}.")

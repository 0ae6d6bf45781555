"""What the engine publishes, into a file as well: a whole recording, whatever the publisher had to throw away.

Owns the writer, and whether the file has a state that frames can follow: after a hole the engine's thread is asked for
one. Whoever publishes never waits for it. Knows neither sockets nor steps.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.telemetry import Frame, Hello, Snapshot, TelemetryMessage
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.state.continuity import Continuity
from kvscope_telemetry.texts.block_texts import RecordedText
from kvscope_telemetry.texts.published_texts import PublishedTexts

MIN_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""How long after a hole the engine is asked for its state: packing it for a disk that is too slow costs little."""


class EngineRecorder:
    """Records to `path`; `tell` is given a line when that ends before its time. Raises BadInput for a path that will
    not do. With `texts` it holds what blocks hold, too: prompts and answers.

    `record` belongs to the thread that publishes, `wants_snapshot` and `give` to the engine's.
    """

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda line: None, *, texts: bool = False) -> None:
        self.writer = RecordingWriter(path)
        self.texts = PublishedTexts(self.writer.write_texts) if texts else None
        self._tell = tell
        self._has_told = self._has_begun = False
        self._sequence = Continuity()
        self._given: deque[Snapshot] = deque()
        self._pause_s = MIN_PAUSE_S
        self._ask_s = 0.0
        self._begun_s = 0.0

    def record(self, message: TelemetryMessage, data: bytes) -> None:
        """`message` is published, as `data`."""
        if self._has_told:
            return
        while self._given:  # it was given before any frame that follows it was published
            self._begin(self._given.popleft())
        if isinstance(message, Frame):
            self._frame(message, data)
        elif self._has_begun and not isinstance(message, Hello):  # the state has it
            self.writer.write(message, data)
        self._look()

    @property
    def wants_texts(self) -> tuple[int, ...]:
        """Blocks whose contents `give_texts` should be given, once no step runs; empty while none are due."""
        return () if self.texts is None or self._has_told else self.texts.due()

    def give_texts(self, contents: Iterable[BlockContent]) -> None:
        """What these blocks hold now."""
        if self.texts is not None:
            self.texts.add_contents(contents)

    def give_requests(self, requests: Iterable[RecordedText]) -> None:
        """Requests that ended, whole."""
        if self.texts is not None and not self._has_told:
            self.writer.write_texts(requests)

    @property
    def wants_snapshot(self) -> bool:
        """Whether `give` should be called, once no step runs."""
        return self._sequence.is_lost and not self._given and not self._has_told and time.monotonic() >= self._ask_s

    def give(self, snapshot: Snapshot) -> None:
        """The whole state after the newest frame."""
        self._given.append(snapshot)

    def close(self) -> None:
        """Make the file whole; one without any state goes. Idempotent."""
        if self.texts is not None:
            self.texts.write()
        with contextlib.suppress(KvscopeError):
            self.writer.close()
            if not self._has_begun:
                self.writer.path.unlink(missing_ok=True)
        self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, snapshot: Snapshot) -> None:
        self._sequence.takes(snapshot)
        self._begun_s = time.monotonic()
        if self.texts is not None:
            self.texts.follow(snapshot)
        if self.writer.write(snapshot):
            self._has_begun = True
        else:
            self._lose()

    def _frame(self, frame: Frame, data: bytes) -> None:
        was_lost = self._sequence.is_lost
        if self._sequence.takes(frame):
            if self.texts is not None:
                self.texts.follow(frame)
            if not self.writer.write(frame, data):
                self._lose()
        elif self._sequence.is_lost and not was_lost:
            self._lose()

    def _lose(self) -> None:
        now_s = time.monotonic()
        lasted_long = now_s - self._begun_s > MAX_PAUSE_S
        self._pause_s = MIN_PAUSE_S if lasted_long else min(2 * self._pause_s, MAX_PAUSE_S)
        self._ask_s = now_s + self._pause_s
        self._sequence.lose()

    def _look(self) -> None:
        if self.writer.failure and not self._has_told:
            self._has_told = True
            self._tell(
                f"recording {str(self.writer.path)!r} stopped early: {self.writer.failure}; the engine continues"
            )

"""Records what the engine publishes to a file, including large messages that the publisher drops instead of sending.

Owns the writer, and whether the file contains a state that frames can continue from. After a gap it requests a
snapshot.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.block_texts.published_texts import PublishedTexts
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.telemetry import Frame, Hello, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.state_continuity import Continuity
from kvscope_telemetry.recordings.writer import RecordingWriter

MIN_REQUEST_DELAY_S: Final = 1.0
MAX_REQUEST_DELAY_S: Final = 30.0
"""Maximum delay between a gap and the next request for a snapshot. The delay doubles from `MIN_REQUEST_DELAY_S`, which
limits the cost of snapshots when the disk is too slow.
"""


class EngineRecorder:
    """Records published messages to `path`. Raises BadInput if the path is not usable.

    `on_problem` receives a text if recording stops early. With `texts`, block contents (prompts and answers) are
    recorded too.

    Threads: `record` belongs to the publishing thread, `wants_snapshot` and `add_snapshot` to the engine's thread.
    """

    def __init__(
        self, path: Path, on_problem: Callable[[str], None] = lambda line: None, *, texts: bool = False
    ) -> None:
        self.writer = RecordingWriter(path)
        self.texts = PublishedTexts(self.writer.write_texts) if texts else None
        self._on_problem = on_problem
        self._has_failed = self._has_started = False
        self._continuity = Continuity()
        self._pending_snapshots: deque[Snapshot] = deque()
        self._request_delay_s = MIN_REQUEST_DELAY_S
        self._next_request_s = 0.0
        self._snapshot_written_s = 0.0

    def record(self, message: TelemetryMessage, data: bytes) -> None:
        if self._has_failed:
            return
        while self._pending_snapshots:  # the snapshot precedes every frame published after it
            self._write_snapshot(self._pending_snapshots.popleft())
        if isinstance(message, Frame):
            self._record_frame(message, data)
        elif self._has_started and not isinstance(message, Hello):  # the snapshot contains the hello
            self.writer.write(message, data)
        self._check_writer()

    @property
    def wants_texts(self) -> tuple[int, ...]:
        return () if self.texts is None or self._has_failed else self.texts.due()

    def add_texts(self, contents: Iterable[BlockContent]) -> None:
        if self.texts is not None:
            self.texts.add_contents(contents)

    def add_requests(self, requests: Iterable[RecordedText]) -> None:
        if self.texts is not None and not self._has_failed:
            self.writer.write_texts(requests)

    @property
    def wants_snapshot(self) -> bool:
        return (
            self._continuity.is_lost
            and not self._pending_snapshots
            and not self._has_failed
            and time.monotonic() >= self._next_request_s
        )

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Queue the complete state after the newest frame. It is written before the next published message."""
        self._pending_snapshots.append(snapshot)

    def close(self) -> None:
        """Complete the file, or delete it if it contains no state. Idempotent."""
        if self.texts is not None:
            self.texts.write()
        with contextlib.suppress(KvscopeError):
            self.writer.close()
            if not self._has_started:
                self.writer.path.unlink(missing_ok=True)
        self._check_writer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        self._continuity.accepts(snapshot)
        self._snapshot_written_s = time.monotonic()
        if self.texts is not None:
            self.texts.add_message(snapshot)
        if self.writer.write(snapshot):
            self._has_started = True
        else:
            self._mark_lost()

    def _record_frame(self, frame: Frame, data: bytes) -> None:
        was_lost = self._continuity.is_lost
        if self._continuity.accepts(frame):
            if self.texts is not None:
                self.texts.add_message(frame)
            if not self.writer.write(frame, data):
                self._mark_lost()
        elif self._continuity.is_lost and not was_lost:
            self._mark_lost()

    def _mark_lost(self) -> None:
        now_s = time.monotonic()
        has_lasted_long = now_s - self._snapshot_written_s > MAX_REQUEST_DELAY_S
        self._request_delay_s = (
            MIN_REQUEST_DELAY_S if has_lasted_long else min(2 * self._request_delay_s, MAX_REQUEST_DELAY_S)
        )
        self._next_request_s = now_s + self._request_delay_s
        self._continuity.mark_lost()

    def _check_writer(self) -> None:
        if self.writer.failure and not self._has_failed:
            self._has_failed = True
            self._on_problem(
                f"recording {str(self.writer.path)!r} stopped early: {self.writer.failure}; the engine continues"
            )

"""Writes a recording to one file, or to several consecutive files that can each be opened alone.

Decides when the next file begins, and writes the state at its beginning. A `SegmentedWriter` is the `Sink` of a live
source. Only the source's reading thread calls `write`; any thread may read the counters.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import PART_SUFFIX
from kvscope_telemetry.recordings.writer import MAX_PENDING_OVERVIEW, RecordingWriter
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent


class SegmentedWriter:
    """Writes to `path`, or to `path` with -001, -002, … before its suffix, with a new file at each limit.

    Raises BadInput for an invalid path.
    """

    def __init__(
        self,
        path: Path,
        segment_seconds: float | None = None,
        segment_bytes: int | None = None,
        *,
        reports_overview: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.paths: list[Path] = []
        self.overview: deque[Summary | TimedEvent] | None = (
            deque(maxlen=MAX_PENDING_OVERVIEW) if reports_overview else None
        )
        """Summaries and events for another thread to pop, oldest first; None unless `reports_overview`."""
        self.num_frames = 0
        self.recorded_s = 0.0
        """Seconds from the first snapshot to the newest message, by the local clock, as the engine's clock may
        be wrong.
        """
        self.has_started = False
        self.engine = ""
        """Name of the engine, from its newest snapshot; empty before the first one."""
        self.failure = ""
        """Reason why messages are no longer accepted; empty while writing works."""
        self._path = path
        self._segment_s = segment_seconds
        self._segment_bytes = segment_bytes
        self._follower = Follower()
        self._clock = clock
        self._started_s = 0.0
        self._num_dropped = 0
        self._finishing_threads: list[threading.Thread] = []
        self._writer = self._next_writer()

    @property
    def num_dropped(self) -> int:
        return self._num_dropped + self._writer.num_dropped

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the file being written; 0 if it cannot be read."""
        with contextlib.suppress(OSError):
            path = self._writer.path
            return path.with_name(path.name + PART_SUFFIX).stat().st_size
        return 0

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """Write a message, with its encoded form in `data` if that is known. Returns False if the message is lost.

        `failure` is set after an error.
        """
        if self.failure or self._writer.failure:
            self.failure = self.failure or self._writer.failure
            return False
        self._record(message)
        if self._is_segmented:
            if isinstance(message, Frame) and self._is_segment_full:
                self._start_next_file()
            self._follower.feed(message)
        return self._writer.write(message, data)

    def write_texts(self, texts: Iterable[RecordedText]) -> object:
        return self._writer.write_texts(texts)

    def write_bookmark(self, bookmark: Bookmark) -> object:
        return self._writer.add_bookmark(bookmark)

    def close(self) -> str:
        """Complete all files. If no snapshot arrived, the only file is deleted. Returns the reason of a
        failure, or "".
        """
        failure = self.failure
        for thread in self._finishing_threads:
            thread.join()
        try:
            self._writer.close()
        except KvscopeError as error:
            failure = str(error)
        if not self.has_started:
            self._writer.path.unlink(missing_ok=True)
        return failure or self.failure

    @property
    def _is_segmented(self) -> bool:
        return self._segment_s is not None or self._segment_bytes is not None

    def _record(self, message: TelemetryMessage) -> None:
        now_s = self._clock()
        if isinstance(message, Snapshot):
            self.engine = message.hello.capabilities.engine
            if not self.has_started:
                self.has_started, self._started_s = True, now_s
        if self.has_started:
            self.recorded_s = now_s - self._started_s
        self.num_frames += isinstance(message, Frame)

    @property
    def _is_segment_full(self) -> bool:
        if self._segment_s is not None and self.recorded_s >= len(self.paths) * self._segment_s:
            return not self._follower.is_lost
        is_size_reached = self._segment_bytes is not None and self.num_bytes >= self._segment_bytes
        return is_size_reached and not self._follower.is_lost

    def _start_next_file(self) -> None:
        """Start the next file with a snapshot of the current state. A thread completes the previous file."""
        self._follower.apply_pending()
        try:
            next_writer = self._next_writer()
        except BadInput as error:
            self.failure = str(error)
            return
        next_writer.write(snapshot_of(self._follower.mirror))
        previous, self._writer = self._writer, next_writer
        self._num_dropped += previous.num_dropped
        self._finishing_threads.append(threading.Thread(target=self._finish, args=(previous,), name="recording-end"))
        self._finishing_threads[-1].start()

    def _finish(self, writer: RecordingWriter) -> None:
        try:
            writer.close()
        except KvscopeError as error:
            self.failure = str(error)

    def _next_writer(self) -> RecordingWriter:
        number = f"-{len(self.paths) + 1:03}" if self._is_segmented else ""
        writer = RecordingWriter(self._path.with_name(f"{self._path.stem}{number}{self._path.suffix}"))
        writer.overview = self.overview
        self.paths.append(writer.path)
        return writer

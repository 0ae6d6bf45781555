"""Writes a recording to one file, or to several consecutive ones that can each be replayed alone.

Decides when the next file begins, and writes the state at its beginning. It is a `Sink` of a live source: only the
source's reading thread calls `write`; any thread may read the numbers. Knows no sockets.
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
    """Writes to `path`, or to `path` with -001, -002, ... before its suffix, starting a new file at each limit.

    Raises BadInput for a path that is not accepted.
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
        """Summaries and events for another thread to pop, oldest first; None unless requested."""
        self.num_frames = 0
        self.recorded_s = 0.0
        """Seconds from the first snapshot to the newest message. Uses the local clock: the engine's may be wrong."""
        self.has_started = False
        self.engine = ""
        """Name of the engine, from the capabilities in its snapshot."""
        self.failure = ""
        """Why messages are no longer accepted; empty while writing works."""
        self._path = path
        self._segment_s = segment_seconds
        self._segment_bytes = segment_bytes
        self._follower = Follower()
        self._clock = clock
        self._started_s = 0.0
        self._num_dropped = 0
        self._ending: list[threading.Thread] = []
        self._writer = self._next_writer()

    @property
    def num_dropped(self) -> int:
        """Number of messages that are missing from all files."""
        return self._num_dropped + self._writer.num_dropped

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the file in progress; 0 if it cannot be read."""
        with contextlib.suppress(OSError):
            path = self._writer.path
            return path.with_name(path.name + PART_SUFFIX).stat().st_size
        return 0

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """Write a message (see `Sink`). Returns False if it is lost; after an error, `failure` gives the reason."""
        if self.failure or self._writer.failure:
            self.failure = self.failure or self._writer.failure
            return False
        self._record(message)
        if self._is_segmented:
            if isinstance(message, Frame) and self._is_due:
                self._start_next()
            self._follower.feed(message)
        return self._writer.write(message, data)

    def write_texts(self, texts: Iterable[RecordedText]) -> object:
        return self._writer.write_texts(texts)

    def write_bookmark(self, bookmark: Bookmark) -> object:
        """Write a revision of a bookmark to the file in progress."""
        return self._writer.add_bookmark(bookmark)

    def close(self) -> str:
        """Complete the files, or delete the file if no snapshot arrived. Returns an error text, or ""."""
        failure = self.failure
        for thread in self._ending:
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
    def _is_due(self) -> bool:
        if self._segment_s is not None and self.recorded_s >= len(self.paths) * self._segment_s:
            return not self._follower.is_lost
        too_many = self._segment_bytes is not None and self.num_bytes >= self._segment_bytes
        return too_many and not self._follower.is_lost

    def _start_next(self) -> None:
        """Continue in a new file, which starts with a snapshot of the current state.

        A thread completes the previous file.
        """
        self._follower.apply_pending()
        try:
            following = self._next_writer()
        except BadInput as error:
            self.failure = str(error)
            return
        following.write(snapshot_of(self._follower.mirror))
        ended, self._writer = self._writer, following
        self._num_dropped += ended.num_dropped
        self._ending.append(threading.Thread(target=self._finish, args=(ended,), name="recording-end"))
        self._ending[-1].start()

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

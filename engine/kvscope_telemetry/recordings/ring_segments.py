"""Sequence of files of a ring: starts the next segment when due, and deletes the oldest ones.

Owns the limits, the size on disk, and the reaction to write errors: the segment ends, and after a pause the next one is
tried. Used by the writing thread; other threads may set the limits and read the sizes. Must not depend on the queue or
the mirror: the caller starts each new file with the complete state.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Hello, Snapshot, TelemetryMessage
from kvscope_telemetry.recordings.mcap_file import Entry, McapFile
from kvscope_telemetry.recordings.ring_folder import segment_path

MIN_SEGMENTS: Final = 8
"""Minimum number of segments into which a ring at its limits is divided. Each segment has at most 1 /
`MIN_SEGMENTS` of the limits, so the ring exceeds its limits by at most one segment.
"""
RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 120.0
"""Maximum pause after a write error. The pause is `RETRY_S` after the first error and doubles with each further
one. After `MAX_RETRY_S` without an error, it is `RETRY_S` again.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on a ring's size and duration. Raises BadInput for values that are not positive."""

    max_bytes: int
    max_seconds: float

    def __post_init__(self) -> None:
        if not self.max_bytes > 0:
            raise BadInput(f"a ring of {self.max_bytes!r} bytes is not accepted: must be at least 1")
        if not 0 < self.max_seconds < 1e9:
            raise BadInput(f"a ring of {self.max_seconds!r} seconds is not accepted: more than 0")


@dataclass(frozen=True, slots=True)
class _CompleteSegment:
    path: Path
    num_bytes: int
    start_ns: int
    end_run_ns: int
    """Value of `RingSegments._run_ns` at the segment's end."""


class RingSegments:
    """A `RecordingFile` that starts a new segment every `segment_seconds`, earlier if the limits are small, and later
    while there are no frames.

    Segments older than `bounds.max_seconds` are deleted, and the oldest ones while all together have more than
    `bounds.max_bytes`. The current segment is never deleted. An engine that starts with its wall clock ahead, for
    example after its machine was suspended, does not age the segments. A full or failing disk raises no error: messages
    are then not recorded, and `wants_state` returns True when it is time to retry.
    """

    def __init__(self, folder: Path, bounds: Bounds, segment_seconds: float, *, retry_seconds: float = RETRY_S) -> None:
        self.path = self.part = folder
        self.bounds = bounds
        """Current limits. Any thread may replace them at any time."""
        self.origin_ns: int | None = None
        """Wall-clock start of the first segment that was ever written, even if it was deleted since; None
        before anything was written.
        """
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.num_bytes = 0
        self.pause = ""
        """Reason why nothing is recorded at present; "" while recording works."""
        self.num_missed = 0
        self._is_paused = False
        self._retry_s = self._first_retry_s = retry_seconds
        self._retry_at_s = self._resumed_s = 0.0
        self._segment_ns = round(segment_seconds * 1e9)
        self._complete: deque[_CompleteSegment] = deque()
        self._number = 0
        self._file: McapFile | None = None
        self._segment_start_ns = 0
        self._num_added = self._head_bytes = 0
        self._has_frames = False
        self._epoch: int | None = None
        self._run_ns = 0
        """Total advance of log times, without the jump to the start of each new epoch. The age of segments is
        measured with this clock.
        """
        self._last_added_s = 0.0

    def wants_state(self, log_time_ns: int) -> bool:
        """Whether the current segment should end before a message of `log_time_ns`, or a retry is due.

        A segment ends when it has lasted long enough, or when it reaches 1 / `MIN_SEGMENTS` of `bounds.max_bytes` and
        at least twice the size of the state that it starts with.
        """
        if self._is_paused:
            return time.monotonic() >= self._retry_at_s
        if self._file is None or self._num_added < 2:
            return False
        longest_ns = self.bounds.max_seconds * 1e9 / MIN_SEGMENTS
        if self._has_frames:  # without frames, the next segment would start with the same state
            longest_ns = min(self._segment_ns, longest_ns)
        if log_time_ns - self._segment_start_ns >= longest_ns:
            return True
        return self._file.num_bytes >= max(self.bounds.max_bytes // MIN_SEGMENTS, 2 * self._head_bytes)

    def start_segment(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._resumed_s = time.monotonic()
        with self._pausing_on_error():
            self._finish_segment()

    @property
    def has_unwritten(self) -> bool:
        return self._file is not None and self._file.has_unwritten

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message. The first one creates a segment."""
        if self._is_paused:
            self.num_missed += 1
            return
        with self._pausing_on_error():
            self._open_file(log_time_ns).add_message(message, log_time_ns, num_bytes, data)
            self._has_frames |= isinstance(message, Frame)
            hello = message if isinstance(message, Hello) else message.hello if isinstance(message, Snapshot) else None
            is_new_epoch = hello is not None and hello.epoch != self._epoch
            if hello is not None:
                self._epoch = hello.epoch
            self._record_added(log_time_ns, is_new_epoch=is_new_epoch)

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None:
        if not self._is_paused:
            with self._pausing_on_error():
                self._open_file(log_time_ns).add_state(log_time_ns, state)
                self._record_added(log_time_ns)

    def add_chunk(self, entries: Sequence[Entry]) -> None:
        """Append summaries, events, bookmarks or texts to the current segment, if there is one."""
        if self._file is not None:
            with self._pausing_on_error():
                self._file.add_chunk(entries)

    def flush(self) -> None:
        """Write everything to the operating system, and delete segments above the limits."""
        with self._pausing_on_error():
            if self._file is not None:
                self._file.flush()
                self._clear_pause()
            self._trim()

    def finish(self) -> None:
        with self._pausing_on_error():
            self._finish_segment()

    def salvage(self) -> bool:
        return self._file is None or self._file.salvage()

    @contextlib.contextmanager
    def _pausing_on_error(self) -> Iterator[None]:
        """Start a pause if the block raises a write error. The data written so far is completed as a segment."""
        try:
            yield
        except (OSError, BadInput) as error:
            self._start_pause(getattr(error, "strerror", None) or str(error))

    def _start_pause(self, reason: str) -> None:
        file, self._file = self._file, None
        if file is not None:
            path = file.path if file.salvage() else file.part
            with contextlib.suppress(OSError):
                self._add_complete(path)
        self._is_paused, self.pause = True, reason
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _clear_pause(self) -> None:
        if self._num_added < 2:
            return
        self.pause = ""
        if self._retry_s > self._first_retry_s and time.monotonic() - self._resumed_s > MAX_RETRY_S:
            self._retry_s = self._first_retry_s

    def _finish_segment(self) -> None:
        if self._file is not None:
            self._file.finish()
            path, self._file = self._file.path, None
            self._add_complete(path)

    def _add_complete(self, path: Path) -> None:
        self._complete.append(_CompleteSegment(path, path.stat().st_size, self._segment_start_ns, self._run_ns))

    def _open_file(self, log_time_ns: int) -> McapFile:
        if self._file is None:
            self._file = self._open_segment(log_time_ns)
        return self._file

    def _record_added(self, log_time_ns: int, *, is_new_epoch: bool = False) -> None:
        now_s = time.monotonic()
        passed_ns = 0 if self.end_ns is None else log_time_ns - self.end_ns
        self._run_ns += min(passed_ns, round((now_s - self._last_added_s) * 1e9)) if is_new_epoch else passed_ns
        self._last_added_s = now_s
        self.end_ns = log_time_ns
        self._num_added += 1
        if self._num_added == 2:  # hello and state, or the engine's snapshot and one message
            self._head_bytes = self._open_file(log_time_ns).num_bytes
            self._trim()

    def _open_segment(self, log_time_ns: int) -> McapFile:
        file = McapFile(segment_path(self.path, self._number + 1))
        self._number += 1
        self._segment_start_ns, self._num_added, self._head_bytes, self._has_frames = log_time_ns, 0, 0, False
        if self.origin_ns is None:
            self.origin_ns = self.start_ns = log_time_ns
        return file

    def _trim(self) -> None:
        bounds = self.bounds
        written = 0 if self._file is None else self._file.num_bytes
        num_bytes = written + sum(segment.num_bytes for segment in self._complete)
        while self._complete and self._is_over(bounds, num_bytes, self._run_ns - self._complete[0].end_run_ns):
            oldest = self._complete.popleft()
            num_bytes -= oldest.num_bytes
            with contextlib.suppress(FileNotFoundError):
                oldest.path.unlink()
        if self.end_ns is not None:
            self.start_ns = self._complete[0].start_ns if self._complete else self._segment_start_ns
        self.num_bytes = num_bytes

    @staticmethod
    def _is_over(bounds: Bounds, num_bytes: int, age_ns: int) -> bool:
        return num_bytes > bounds.max_bytes or age_ns > bounds.max_seconds * 1e9

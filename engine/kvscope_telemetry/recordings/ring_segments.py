"""The files of a ring, one after another: when the next begins, and when the oldest goes.

Owns the bounds, what is on the disk, and what happens when that takes no more: the segment ends, and after a while the
next is tried. Used by the thread that writes; bounds are set and sizes read by any. Knows neither queue nor mirror:
whoever adds makes a new file begin with the whole state.
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

PARTS: Final = 8
"""A segment is at most this part of the bounds: so much more than asked is kept, at most."""
RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 120.0
"""How long nothing is tried when the disk takes no more: twice as long each time, until it took some for so long."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept at most. Raises BadInput for less than nothing."""

    max_bytes: int
    max_seconds: float

    def __post_init__(self) -> None:
        if not self.max_bytes > 0:
            raise BadInput(f"a ring of {self.max_bytes!r} bytes is not accepted: at least 1")
        if not 0 < self.max_seconds < 1e9:
            raise BadInput(f"a ring of {self.max_seconds!r} seconds is not accepted: more than 0")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A segment that nothing is added to any more."""

    path: Path
    num_bytes: int
    start_ns: int
    end_run_ns: int
    """`RingSegments._run_ns` at its end."""


class RingSegments:
    """A `RecordingFile` that begins anew every `segment_seconds`, or sooner where the bounds are narrow; later while no
    frames come.

    Segments that ended longer ago than `bounds` says go, and the oldest where all are too large, but never the one that
    is written. Where an engine starts with its wall clock ahead, as after its machine was suspended, nothing is older
    for that. It never raises for a disk that takes no more: what is added then is not kept, and `wants_state` says
    when to try again.
    """

    def __init__(self, folder: Path, bounds: Bounds, segment_seconds: float, *, retry_seconds: float = RETRY_S) -> None:
        self.path = self.part = folder
        self.bounds = bounds
        """Another may be put in its place at any time."""
        self.origin_ns: int | None = None
        """When the first segment of all began, by the wall clock; None before anything was written."""
        self.start_ns: int | None = None
        """When the oldest segment that is left begins."""
        self.end_ns: int | None = None
        """When what was added last was."""
        self.num_bytes = 0
        """On the disk."""
        self.pause = ""
        """Why nothing is kept for now; empty while all is well."""
        self.num_missed = 0
        """Messages that came meanwhile."""
        self._is_resting = False
        self._retry_s = self._first_retry_s = retry_seconds
        self._again_s = self._rested_s = 0.0
        self._segment_ns = round(segment_seconds * 1e9)
        self._whole: deque[_Whole] = deque()
        self._number = 0
        self._file: McapFile | None = None
        self._began_ns = 0
        self._num_added = self._head_bytes = 0
        self._has_frames = False
        self._epoch: int | None = None
        self._run_ns = 0
        """How far log times went, without jumps where an epoch begins: by this segments age."""
        self._added_s = 0.0

    def wants_state(self, log_time_ns: int) -> bool:
        """Whether the segment that is written is long enough to end before a message of `log_time_ns`. One has at least
        as much besides the state that it begins with, or lasts as long as its part of the bounds."""
        if self._is_resting:
            return time.monotonic() >= self._again_s
        if self._file is None or self._num_added < 2:
            return False
        longest_ns = self.bounds.max_seconds * 1e9 / PARTS
        if self._has_frames:  # else the next state would be this one again
            longest_ns = min(self._segment_ns, longest_ns)
        if log_time_ns - self._began_ns >= longest_ns:
            return True
        return self._file.num_bytes >= max(self.bounds.max_bytes // PARTS, 2 * self._head_bytes)

    def begin_anew(self) -> None:
        """End the segment that is written, or try again."""
        if self._is_resting:
            self._is_resting = False
            self._rested_s = time.monotonic()
        with self._resting():
            self._end()

    @property
    def holds_back(self) -> bool:
        """Whether something was added that is not handed to the system."""
        return self._file is not None and self._file.holds_back

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message; the first begins a segment."""
        if self._is_resting:
            self.num_missed += 1
            return
        with self._resting():
            self._writable(log_time_ns).add_message(message, log_time_ns, num_bytes, data)
            self._has_frames |= isinstance(message, Frame)
            hello = message if isinstance(message, Hello) else message.hello if isinstance(message, Snapshot) else None
            is_new_epoch = hello is not None and hello.epoch != self._epoch
            if hello is not None:
                self._epoch = hello.epoch
            self._added(log_time_ns, is_new_epoch=is_new_epoch)

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None:
        """Append a keyframe or a delta checkpoint."""
        if not self._is_resting:
            with self._resting():
                self._writable(log_time_ns).add_state(log_time_ns, state)
                self._added(log_time_ns)

    def add_together(self, entries: Sequence[Entry]) -> None:
        """Append what was made of the messages in the segment."""
        if self._file is not None:
            with self._resting():
                self._file.add_together(entries)

    def flush(self) -> None:
        """Hand all to the system; what is over the bounds goes."""
        with self._resting():
            if self._file is not None:
                self._file.flush()
                self._went_well()
            self._trim()

    def finish(self) -> None:
        """Make the last segment whole."""
        with self._resting():
            self._end()

    def end_early(self) -> bool:
        """Make the segment that is written whole as far as it goes; whether that could be done."""
        return self._file is None or self._file.end_early()

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Where the disk takes no more, there is a rest: what was written by then ends as a segment."""
        try:
            yield
        except (OSError, BadInput) as error:
            self._rest(getattr(error, "strerror", None) or str(error))

    def _rest(self, reason: str) -> None:
        file, self._file = self._file, None
        if file is not None:
            path = file.path if file.end_early() else file.part
            with contextlib.suppress(OSError):
                self._add_whole(path)
        self._is_resting, self.pause = True, reason
        self._again_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _went_well(self) -> None:
        """Bytes reached the disk, of a segment that has its state."""
        if self._num_added < 2:
            return
        self.pause = ""
        if self._retry_s > self._first_retry_s and time.monotonic() - self._rested_s > MAX_RETRY_S:
            self._retry_s = self._first_retry_s

    def _end(self) -> None:
        if self._file is not None:
            self._file.finish()
            path, self._file = self._file.path, None
            self._add_whole(path)

    def _add_whole(self, path: Path) -> None:
        self._whole.append(_Whole(path, path.stat().st_size, self._began_ns, self._run_ns))

    def _writable(self, log_time_ns: int) -> McapFile:
        """The segment in progress."""
        if self._file is None:
            self._file = self._begin(log_time_ns)
        return self._file

    def _added(self, log_time_ns: int, *, is_new_epoch: bool = False) -> None:
        now_s = time.monotonic()
        passed_ns = 0 if self.end_ns is None else log_time_ns - self.end_ns
        self._run_ns += min(passed_ns, round((now_s - self._added_s) * 1e9)) if is_new_epoch else passed_ns
        self._added_s = now_s
        self.end_ns = log_time_ns
        self._num_added += 1
        if self._num_added == 2:  # hello and state, or the engine's snapshot and a little
            self._head_bytes = self._writable(log_time_ns).num_bytes
            self._trim()

    def _begin(self, log_time_ns: int) -> McapFile:
        file = McapFile(segment_path(self.path, self._number + 1))
        self._number += 1
        self._began_ns, self._num_added, self._head_bytes, self._has_frames = log_time_ns, 0, 0, False
        if self.origin_ns is None:
            self.origin_ns = self.start_ns = log_time_ns
        return file

    def _trim(self) -> None:
        bounds = self.bounds
        written = 0 if self._file is None else self._file.num_bytes
        num_bytes = written + sum(segment.num_bytes for segment in self._whole)
        while self._whole and self._is_over(bounds, num_bytes, self._run_ns - self._whole[0].end_run_ns):
            oldest = self._whole.popleft()
            num_bytes -= oldest.num_bytes
            with contextlib.suppress(FileNotFoundError):
                oldest.path.unlink()
        if self.end_ns is not None:
            self.start_ns = self._whole[0].start_ns if self._whole else self._began_ns
        self.num_bytes = num_bytes

    @staticmethod
    def _is_over(bounds: Bounds, num_bytes: int, age_ns: int) -> bool:
        return num_bytes > bounds.max_bytes or age_ns > bounds.max_seconds * 1e9

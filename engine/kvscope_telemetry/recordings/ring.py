"""Ring recording of a live session: keeps its last minutes on disk, within limits on size and time.

Owns the folder and its status. One thread writes, through a bounded queue (`RecordingWriter`). If writing becomes
impossible, the session continues without a ring and `failure` gives the reason. While the disk is full or fails,
`pause` gives the reason; the ring later continues with a complete state. Must not depend on `Recording`, which reads
rings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS
from kvscope_telemetry.recordings.ring_folder import RingFolder
from kvscope_telemetry.recordings.ring_segments import RETRY_S, Bounds, RingSegments
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent

MAX_BYTES: Final = 512 << 20
MAX_SECONDS: Final = 600.0
SEGMENT_S: Final = 30.0
FLUSH_WAIT_S: Final = 10.0
"""Maximum time that a seek into the past waits until received messages are written. Otherwise, the readable
part could end before the requested time.
"""


class Ring:
    """Writes segments `000001.mcap`, ... into `folder`, which belongs to this ring alone. Call `close` at the end.

    Each segment starts with a hello and the complete state, so that it can be opened on its own. Raises BadInput for
    invalid limits; an unusable folder is reported in `failure`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        segment_seconds: float = SEGMENT_S,
        keyframe_interval_ns: int = INTERVAL_NS,
        retry_seconds: float = RETRY_S,
    ) -> None:
        bounds = Bounds(max_bytes, max_seconds)
        self._segments = RingSegments(Path(folder), bounds, segment_seconds, retry_seconds=retry_seconds)
        self._folder: RingFolder | None = None
        self._writer: RecordingWriter | None = None
        self._refusal = ""
        try:
            self._folder = RingFolder(Path(folder))
            self._writer = RecordingWriter(
                self._segments, keyframe_interval_ns=keyframe_interval_ns, collects_overview=True
            )
        except BadInput as error:
            self._refusal = str(error)

    @property
    def folder(self) -> Path:
        return self._segments.path

    @property
    def failure(self) -> str:
        """Reason why recording has ended, as a text for the user; "" while it works. Messages recorded before remain
        readable.
        """
        if self._writer is not None and self._writer.failure:
            return f"ring folder {self.folder} takes no more: {self._writer.failure}"
        return self._refusal

    @property
    def pause(self) -> str:
        """Reason why nothing is recorded at present, as a text for the user; "" while recording works. Continue to call
        `write`, because the ring retries by itself.
        """
        reason = self._segments.pause
        return f"cannot write to the history folder {self.folder}: {reason}; retrying" if reason else ""

    @property
    def num_bytes(self) -> int:
        return self._segments.num_bytes

    @property
    def origin_ns(self) -> int | None:
        """Wall-clock time at which the ring started, even if its first messages were deleted since; None before
        the first message.
        """
        return self._segments.origin_ns

    @property
    def start_ns(self) -> int | None:
        """Wall-clock time of the oldest retained message; None before the first message."""
        return self._segments.start_ns

    @property
    def end_ns(self) -> int | None:
        """Wall-clock time of the newest message; None before the first."""
        return self._segments.end_ns

    @property
    def num_dropped(self) -> int:
        """Number of messages that were not recorded: the queue was full, the disk failed, or the ring had ended."""
        return 0 if self._writer is None else self._writer.num_dropped + self._segments.num_missed

    @property
    def bounds(self) -> Bounds:
        return self._segments.bounds

    def drain_overview(self) -> list[Summary | TimedEvent]:
        """Return and clear the summaries and events created since the last call, oldest first."""
        overview = None if self._writer is None else self._writer.overview
        return [overview.popleft() for _ in range(len(overview))] if overview else []

    def set_bounds(self, *, max_bytes: int, max_seconds: float) -> None:
        """Change the limits on size and time. Raises BadInput for invalid values."""
        self._segments.bounds = Bounds(max_bytes, max_seconds)

    def write(self, message: TelemetryMessage, data: bytes | None = None, *, wait: bool = False) -> bool:
        """Record a message, like `RecordingWriter.write`: never raises, and blocks only if `wait` is set. Returns
        whether it was accepted.
        """
        return self._writer is not None and self._writer.write(message, data, wait=wait)

    def add_bookmark(self, bookmark: Bookmark) -> bool:
        return self._writer is not None and self._writer.add_bookmark(bookmark)

    def write_texts(self, texts: Iterable[RecordedText]) -> bool:
        return self._writer is not None and self._writer.write_texts(texts)

    def flush(self, timeout_s: float = FLUSH_WAIT_S) -> bool:
        """Make everything written so far visible to readers. Returns whether that succeeded in time."""
        return self._writer is not None and self._writer.flush(timeout_s) and not self.pause

    def close(self, *, keep: bool = False) -> None:
        """Write queued messages and release the folder, which is deleted unless `keep`. Idempotent."""
        if self._writer is not None:
            with contextlib.suppress(KvscopeError):  # reported in `failure`
                self._writer.close()
        folder, self._folder = self._folder, None
        if folder is not None and keep:
            folder.release()
        elif folder is not None:
            folder.delete()

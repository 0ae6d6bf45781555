"""The last minutes of a live session, written to disk all the time: a sink that keeps within its bounds.

Owns the folder and what it says of itself. One thread writes, through a bounded queue (`RecordingWriter`); where that
cannot go on the session does, without a ring, and `failure` says why. While the disk takes no more `pause` says so, and
the ring begins again with the whole state when it does. Knows nobody who reads: `Recording` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS
from kvscope_telemetry.recordings.ring_folder import RingFolder
from kvscope_telemetry.recordings.ring_segments import RETRY_S, Bounds, RingSegments
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText

MAX_BYTES: Final = 512 << 20
MAX_SECONDS: Final = 600.0
SEGMENT_S: Final = 30.0
FLUSH_WAIT_S: Final = 10.0
"""Who goes back waits so long for what is not written yet: sooner, the past ends before where they want to be."""


class Ring:
    """Writes segments `000001.mcap`, … into `folder`, which is this ring's alone; `close` at the end.

    Each segment begins with hello and the whole state, so that it can be opened by itself. Raises BadInput for bounds
    that make no sense; a folder that will not do is told in `failure`.
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
                self._segments, keyframe_interval_ns=keyframe_interval_ns, tells_overview=True
            )
        except BadInput as error:
            self._refusal = str(error)

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self._segments.path

    @property
    def failure(self) -> str:
        """Why nothing more is kept, for a person; empty while all is well. What was kept until then can be read."""
        if self._writer is not None and self._writer.failure:
            return f"ring folder {self.folder} takes no more: {self._writer.failure}"
        return self._refusal

    @property
    def pause(self) -> str:
        """Why nothing is kept for now, for a person; empty while all is well. It is given all the same: it follows, and
        tries again by itself."""
        reason = self._segments.pause
        return f"cannot write to the history folder {self.folder}: {reason}; retrying" if reason else ""

    @property
    def num_bytes(self) -> int:
        """On the disk, as of the last second."""
        return self._segments.num_bytes

    @property
    def origin_ns(self) -> int | None:
        """When it began, by the wall clock, even if that is no longer there; None before there is anything."""
        return self._segments.origin_ns

    @property
    def start_ns(self) -> int | None:
        """When what is left begins, by the wall clock; None before there is anything."""
        return self._segments.start_ns

    @property
    def end_ns(self) -> int | None:
        """When what was written last was, by the wall clock."""
        return self._segments.end_ns

    @property
    def num_dropped(self) -> int:
        """Messages that are not in it: the queue was full, the disk took no more, or it had ended."""
        return 0 if self._writer is None else self._writer.num_dropped + self._segments.num_missed

    @property
    def bounds(self) -> Bounds:
        """How much is kept at most."""
        return self._segments.bounds

    def take_overview(self) -> list[Summary | TimedEvent]:
        """What was summarized since the last call, oldest first."""
        overview = None if self._writer is None else self._writer.overview
        return [overview.popleft() for _ in range(len(overview))] if overview else []

    def set_bounds(self, *, max_bytes: int, max_seconds: float) -> None:
        """Keep so much at most from now on. Raises BadInput for what makes no sense."""
        self._segments.bounds = Bounds(max_bytes, max_seconds)

    def write(self, message: TelemetryMessage, data: bytes | None = None, *, wait: bool = False) -> bool:
        """As `RecordingWriter.write`: never blocks without `wait`, never raises. False: it is not in the ring."""
        return self._writer is not None and self._writer.write(message, data, wait=wait)

    def mark(self, bookmark: Bookmark) -> bool:
        """As `RecordingWriter.mark`."""
        return self._writer is not None and self._writer.mark(bookmark)

    def write_texts(self, texts: Iterable[RecordedText]) -> bool:
        """What blocks hold, where a person agreed that it is kept."""
        return self._writer is not None and self._writer.write_texts(texts)

    def flush(self, timeout_s: float = FLUSH_WAIT_S) -> bool:
        """Let readers see all that was given up to now; whether that was done in time."""
        return self._writer is not None and self._writer.flush(timeout_s) and not self.pause

    def close(self, *, keep: bool = False) -> None:
        """Write what waits and let go of the folder; it is deleted unless `keep`. Idempotent."""
        if self._writer is not None:
            with contextlib.suppress(KvscopeError):  # told in `failure`
                self._writer.close()
        folder, self._folder = self._folder, None
        if folder is not None and keep:
            folder.release()
        elif folder is not None:
            folder.delete()

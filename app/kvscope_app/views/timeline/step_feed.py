"""Reads the steps of the timeline's visible span from the recording, on a thread.

Owns the steps read last.
"""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.recording.recording_reader import RecordingReader
from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.timeline.steps import NO_STEPS, StepColumns, read_steps

_MARGIN_SHARE: Final = 0.5
_TIMEOUT_S: Final = 10.0
_MIN_INTERVAL_S: Final = 0.7
RETRY_DELAY_S: Final = 5.0


class StepFeed(QObject):
    """Reads the steps of the visible span. Call `request` for each new span; `changed` is emitted after each read."""

    changed = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.steps: StepColumns = NO_STEPS
        self._session = session
        self._last_request_s = 0.0
        self._requested_frame: tuple[int | None, int] | None = None
        """(epoch, sequence number) of the newest frame when the last read began. None for a file, and if that
        read ended before the newest frame.
        """
        self._reader: RecordingReader[StepColumns] = RecordingReader(session, "kvscope-steps", self)
        self._reader.finished.connect(self._on_read)

    @property
    def is_reading(self) -> bool:
        return self._reader.is_reading

    @property
    def failure(self) -> str:
        return self._reader.failure

    def request(self, span: TimeSpan, whole: TimeSpan) -> None:
        """Read the steps of `span` within `whole`, unless they have been read already or a read is running."""
        begin_ns, end_ns = max(span.begin_ns, whole.begin_ns), min(span.end_ns, whole.end_ns)
        if self.is_reading or self.steps.covers(begin_ns, end_ns):
            return
        if time.monotonic() - self._last_request_s < self._min_interval_s(begin_ns) or self._is_up_to_date(begin_ns):
            return
        margin_ns = round(span.length_ns * _MARGIN_SHARE)
        first_ns, last_ns = max(begin_ns - margin_ns, whole.begin_ns), min(end_ns + margin_ns, whole.end_ns)
        self._last_request_s = time.monotonic()
        self._requested_frame = self._live_end() if last_ns == whole.end_ns else None
        self._reader.start(lambda recorded, report_progress: read_steps(recorded, first_ns, last_ns, report_progress))

    def finish(self) -> None:
        self._reader.finish(_TIMEOUT_S)

    def close(self) -> None:
        self._reader.close()

    def _min_interval_s(self, begin_ns: int) -> float:
        if self.failure:
            return RETRY_DELAY_S
        has_only_grown = self.steps.covers(begin_ns, begin_ns)
        return _MIN_INTERVAL_S if has_only_grown else 0.0

    def _is_up_to_date(self, begin_ns: int) -> bool:
        """Whether `steps` contains all steps after `begin_ns`, because no frame has arrived since it was read."""
        end = self._live_end()
        has_new_frames = end is None or end != self._requested_frame
        return not has_new_frames and not self.failure and self.steps.covers(begin_ns, begin_ns)

    def _live_end(self) -> tuple[int | None, int] | None:
        if self._session.timeline.is_file:
            return None
        return self._session.live_mirror.epoch, self._session.live_mirror.seq

    def _on_read(self) -> None:
        if self._reader.result is not None:
            self.steps = self._reader.result
        self.changed.emit()

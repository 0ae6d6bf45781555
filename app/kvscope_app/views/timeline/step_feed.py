"""Reads the steps of the timeline's visible span, with a margin, from the recording on a thread.

Owns the wanted span and the steps read last. Reads nothing while the span is too long to show single steps.
"""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.recording.recording_reader import RecordingReader
from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.timeline.steps import NO_STEPS, StepColumns, read_steps

_MARGIN: Final = 0.5
"""Share of the span that is also read on either side of it."""
_TIMEOUT_S: Final = 10.0
_MIN_INTERVAL_S: Final = 0.7
"""Minimum seconds between two reads of a growing end."""
RETRY_DELAY_S: Final = 5.0
"""Seconds before a failed read is retried."""


class StepFeed(QObject):
    """Reader of steps. Call `request` with each visible span.

    `steps` holds the steps read last, and `changed` is emitted after each read.
    """

    changed = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.steps: StepColumns = NO_STEPS
        self._session = session
        self._requested_s = 0.0
        self._requested_at: tuple[int | None, int] | None = None
        """Newest frame at the time of a read up to the live end; None if the last read did not reach it."""
        self._reading: RecordingReader[StepColumns] = RecordingReader(session, "kvscope-steps", self)
        self._reading.finished.connect(self._on_read)

    @property
    def is_reading(self) -> bool:
        return self._reading.is_reading

    @property
    def failure(self) -> str:
        """Error message of the last read, "" if it succeeded."""
        return self._reading.failure

    def request(self, span: TimeSpan, whole: TimeSpan) -> None:
        """Read the steps of `span` within `whole`, unless they are known or a read is running."""
        begin_ns, end_ns = max(span.begin_ns, whole.begin_ns), min(span.end_ns, whole.end_ns)
        if self.is_reading or self.steps.covers(begin_ns, end_ns):
            return
        if time.monotonic() - self._requested_s < self._min_interval_s(begin_ns) or self._knows_all(begin_ns):
            return
        margin_ns = round(span.length_ns * _MARGIN)
        first_ns, last_ns = max(begin_ns - margin_ns, whole.begin_ns), min(end_ns + margin_ns, whole.end_ns)
        self._requested_s = time.monotonic()
        self._requested_at = self._live_end() if last_ns == whole.end_ns else None
        self._reading.start(lambda recorded, watch: read_steps(recorded, first_ns, last_ns, watch))

    def finish(self) -> None:
        """Wait for a running read."""
        self._reading.finish(_TIMEOUT_S)

    def close(self) -> None:
        self._reading.close()

    def _min_interval_s(self, begin_ns: int) -> float:
        """Return the minimum seconds between two reads."""
        if self.failure:
            return RETRY_DELAY_S
        has_only_grown = self.steps.covers(begin_ns, begin_ns)
        return _MIN_INTERVAL_S if has_only_grown else 0.0

    def _knows_all(self, begin_ns: int) -> bool:
        """Whether only the live end moved, without any new frame."""
        end = self._live_end()
        return (
            end is not None and end == self._requested_at and not self.failure and self.steps.covers(begin_ns, begin_ns)
        )

    def _live_end(self) -> tuple[int | None, int] | None:
        """Return (epoch, seq) of the newest frame of a live engine; None for a file, which may grow beyond what is
        shown."""
        if self._session.timeline.is_file:
            return None
        return self._session.live_mirror.epoch, self._session.live_mirror.seq

    def _on_read(self) -> None:
        if self._reading.result is not None:
            self.steps = self._reading.result
        self.changed.emit()

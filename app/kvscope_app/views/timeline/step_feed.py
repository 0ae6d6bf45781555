"""The steps of what is seen of a timeline, read on a thread from what was recorded; a little more is read than is seen.

Owns which stretch is wanted and the last that was read. Reads nothing while so much is seen that steps are no boxes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.kept.own_handle import OwnHandle
from kvscope_app.session.session import Session
from kvscope_app.views.timeline.steps import NO_STEPS, Steps, read_steps
from kvscope_app.views.timeline.time_span import TimeSpan
from kvscope_telemetry.recordings.effort import Watch

_LOOK_MS: Final = 50
_MARGIN: Final = 0.5
"""Of the span, read on either side of it."""
_PATIENCE_S: Final = 10.0
_AGAIN_S: Final = 0.7
"""Between two looks at an end that goes on."""


class StepFeed(QObject):
    """Call `want` with each span that is seen; `steps` are those read last, `changed` tells of others."""

    changed = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.steps: Steps = NO_STEPS
        self._session = session
        self._handle: OwnHandle | None = None
        self._work: Background[Steps] | None = None
        self._reading: TimeSpan | None = None
        self._asked_s = 0.0
        self._timer = QTimer(self, interval=_LOOK_MS)
        self._timer.timeout.connect(self._look)

    @property
    def is_reading(self) -> bool:
        """Whether more comes."""
        return self._work is not None

    def want(self, span: TimeSpan, whole: TimeSpan) -> None:
        """Steps of `span`, of what there is in `whole`."""
        begin_ns, end_ns = max(span.begin_ns, whole.begin_ns), min(span.end_ns, whole.end_ns)
        if self._work is not None or self.steps.covers(begin_ns, end_ns) or not hasattr(self._session, "own_handle"):
            return
        is_same = self.steps.covers(begin_ns, begin_ns)  # only the end went on
        if is_same and time.monotonic() - self._asked_s < _AGAIN_S:
            return
        self._handle = self._handle or self._session.own_handle()
        if self._handle is None:
            return
        margin_ns = round(span.length_ns * _MARGIN)
        wanted = TimeSpan(max(begin_ns - margin_ns, whole.begin_ns), min(end_ns + margin_ns, whole.end_ns))
        self._asked_s, self._reading = time.monotonic(), wanted
        self._work = Background(_reading(self._handle, wanted), "kvscope-steps")
        self._timer.start()

    def finish(self) -> None:
        """Wait for what is read."""
        if self._work is not None:
            self._work.wait(_PATIENCE_S)
            self._look()

    def close(self) -> None:
        """No more."""
        self._timer.stop()
        if self._work is not None:
            self._work.cancel()
            self._work.wait(2.0)
            self._work = None

    def _look(self) -> None:
        work = self._work
        if work is None or not work.is_over:
            return
        self._work = None
        self._timer.stop()
        if work.made is not None:
            self.steps = work.made
        self.changed.emit()


def _reading(handle: OwnHandle, span: TimeSpan) -> Callable[[Watch], Steps]:
    def work(watch: Watch) -> Steps:
        return read_steps(handle.get(watch), span.begin_ns, span.end_ns, watch)

    return work

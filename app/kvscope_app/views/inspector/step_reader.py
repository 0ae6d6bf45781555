"""The frame of the step that is shown, read from what was recorded on a thread.

Owns which one is wanted, and the last that was found. Reads nothing while time goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.kept.own_handle import OwnHandle
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.effort import OpeningCancelled, Watch

_BEFORE_S: Final = 2.0
_AFTER_S: Final = 0.5
_LOOK_MS: Final = 60
Place = tuple[int, int]
"""Epoch and number of a frame."""


class StepReader(QObject):
    """Ask `frame`; `found` tells that asking again is worth it."""

    found = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._handle: OwnHandle | None = None
        self._known: tuple[Place, Frame | None] | None = None
        self._wanted: tuple[Place, int] | None = None
        self._reading: Place | None = None
        self._work: Background[Frame | None] | None = None
        self._timer = QTimer(self, interval=_LOOK_MS)
        self._timer.timeout.connect(self._look)

    @property
    def is_reading(self) -> bool:
        """Whether `found` will tell."""
        return self._work is not None or self._wanted is not None

    def frame(self, place: Place, at_ns: int) -> Frame | None:
        """The frame of `place`, which is about at `at_ns` by the wall clock; None while it is not known."""
        if self._known is not None and self._known[0] == place:
            return self._known[1]
        if self._reading != place and (self._wanted is None or self._wanted[0] != place):
            self._handle = self._handle or self._session.own_handle()
            if self._handle is not None:
                self._wanted = (place, at_ns)
                self._timer.start()
        return None

    def close(self) -> None:
        """No more."""
        self._timer.stop()
        self._wanted = None
        if self._work is not None:
            self._work.cancel()
            self._work.wait(2.0)

    def _look(self) -> None:
        if self._work is not None and self._work.is_over:
            if self._reading is not None:
                self._known = (self._reading, self._work.made)
            self._work = self._reading = None
            self.found.emit()
        if self._work is None and self._wanted is not None and self._handle is not None:
            place, at_ns = self._wanted
            self._wanted, self._reading = None, place
            self._work = Background(_reading(self._handle, place, at_ns), "kvscope-step")
        if self._work is None:
            self._timer.stop()


def _reading(handle: OwnHandle, place: Place, at_ns: int) -> Callable[[Watch], Frame | None]:
    def work(watch: Watch) -> Frame | None:
        recorded = handle.get(watch)
        at_s = (at_ns - recorded.start_ns) / 1e9
        for frame in recorded.frames(max(at_s - _BEFORE_S, 0.0), at_s + _AFTER_S):
            if not watch(0.0):
                raise OpeningCancelled
            if (frame.epoch, frame.seq) == place:
                return frame
        return None

    return work

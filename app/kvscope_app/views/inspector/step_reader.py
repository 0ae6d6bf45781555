"""The frame of the step that is shown, read from what was recorded on a thread. Reads nothing while time goes on."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QObject

from kvscope_app.session.kept.recorded_lookup import RecordedLookup
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.effort import OpeningCancelled, Watch

_BEFORE_S: Final = 2.0
_AFTER_S: Final = 0.5
Place = tuple[int, int]
"""Epoch and number of a frame."""


class StepReader(RecordedLookup[Place, Frame]):
    """Ask for the frame of a place with `get`; the last one is kept."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(session, _read, "kvscope-step", 1, parent)


def _read(recorded: Recorded, place: Place, at_ns: int, watch: Watch) -> Frame | None:
    at_s = (at_ns - recorded.start_ns) / 1e9
    for frame in recorded.frames(max(at_s - _BEFORE_S, 0.0), at_s + _AFTER_S):
        if not watch(0.0):
            raise OpeningCancelled
        if (frame.epoch, frame.seq) == place:
            return frame
    return None

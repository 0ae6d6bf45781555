"""Finds when requests got their first token where nobody saw it: reads that from the recording, on a thread.

After a jump to a moment only later updates are seen; the time of an earlier first token is looked up for the shown
request.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from PySide6.QtCore import QObject

from kvscope_app.session.kept.recorded_lookup import RecordedLookup
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback

UNKNOWN: Final = -1
_MAX_WORK_S: Final = 5.0
_MAX_AFTER_S: Final = 600.0
_BEFORE_S: Final = 1.0
_MOST_KEPT: Final = 256
Who = tuple[int, int]
"""Epoch and number of a request."""


class FirstTokens(RecordedLookup[Who, int]):
    """Ask with `get` when the first token of a request came, by its engine's clock, about when it was admitted."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(session, _read, "kvscope-first-token", _MOST_KEPT, parent)


def _read(recorded: Recorded, who: Who, admitted_ns: int, watch: ProgressCallback) -> int | None:
    until_s = time.monotonic() + _MAX_WORK_S
    begin_s = max((admitted_ns - recorded.start_ns) / 1e9 - _BEFORE_S, 0.0)
    for frame in recorded.frames(begin_s, begin_s + _MAX_AFTER_S):
        if not watch(0.0):
            raise OpeningCancelled
        if has_first_token(frame, who):
            return frame.time_ns
        if time.monotonic() > until_s:
            break
    return None


def find_first_token(session: Session, reader: FirstTokens, number: int, admitted_ns: int) -> int:
    """Of a request of the engine start that is shown, both by its engine's clock."""
    hello = session.mirror.hello
    if hello is None:
        return UNKNOWN
    found_ns = reader.get((hello.epoch, number), admitted_ns + hello.wall_time_ns - hello.time_ns)
    return UNKNOWN if found_ns is None else found_ns


def has_first_token(frame: Frame, who: Who) -> bool:
    """Whether request `who` has a token after this step."""
    epoch, number = who
    if frame.epoch != epoch or number.to_bytes(4, "little") not in frame.requests.number:
        return False
    places = np.flatnonzero(np.frombuffer(frame.requests.number, "<u4") == number)
    tokens = np.frombuffer(frame.requests.num_output_tokens, "<u4")
    return bool(places.size and places[0] < tokens.size and tokens[places[0]] > 0)

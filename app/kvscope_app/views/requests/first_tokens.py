"""When requests got their first token, where nobody saw it: read from what was recorded, on a thread.

Who goes to a moment sees what comes after it; what was before is looked up here for the request that is told about.
Owns what is known and which one is read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.kept.own_handle import OwnHandle
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.effort import OpeningCancelled, Watch

UNKNOWN: Final = -1
_LOOK_MS: Final = 60
_MAX_WORK_S: Final = 5.0
_MAX_AFTER_S: Final = 600.0
_BEFORE_S: Final = 1.0
_MOST_KEPT: Final = 256
Who = tuple[int, int]
"""Epoch and number of a request."""


class FirstTokens(QObject):
    """Ask `of`; `found` tells that asking again is worth it."""

    found = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._handle: OwnHandle | None = None
        self._known: OrderedDict[Who, int] = OrderedDict()
        self._wanted: tuple[Who, int] | None = None
        self._reading: Who | None = None
        self._work: Background[int] | None = None
        self._timer = QTimer(self, interval=_LOOK_MS)
        self._timer.timeout.connect(self._look)

    def of(self, who: Who, admitted_ns: int) -> int:
        """When the first token of `who` came, by its engine's clock, or `UNKNOWN`. `admitted_ns`: when it was admitted,
        by the wall clock."""
        if who in self._known:
            return self._known[who]
        if who != self._reading:
            self._handle = self._handle or self._session.own_handle()
            if self._handle is not None:
                self._wanted = (who, admitted_ns)
                self._timer.start()
        return UNKNOWN

    def close(self) -> None:
        """No more."""
        self._timer.stop()
        self._wanted = None
        if self._work is not None:
            self._work.cancel()
            self._work.wait(2.0)

    def _look(self) -> None:
        work = self._work
        if work is not None and work.is_over:
            if self._reading is not None:
                self._known[self._reading] = UNKNOWN if work.made is None else work.made
                while len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)
            self._work = self._reading = None
            self.found.emit()
        if self._work is None and self._wanted is not None and self._handle is not None:
            who, admitted_ns = self._wanted
            self._wanted, self._reading = None, who
            self._work = Background(_reading(self._handle, who, admitted_ns), "kvscope-first-token")
        if self._work is None:
            self._timer.stop()


def _reading(handle: OwnHandle, who: Who, admitted_ns: int) -> Callable[[Watch], int]:
    def work(watch: Watch) -> int:
        recorded, until_s = handle.get(watch), time.monotonic() + _MAX_WORK_S
        begin_s = max((admitted_ns - recorded.start_ns) / 1e9 - _BEFORE_S, 0.0)
        for frame in recorded.frames(begin_s, begin_s + _MAX_AFTER_S):
            if not watch(0.0):
                raise OpeningCancelled
            if has_first_token(frame, who):
                return frame.time_ns
            if time.monotonic() > until_s:
                break
        return UNKNOWN

    return work


def find_first_token(session: Session, reader: FirstTokens, number: int, admitted_ns: int) -> int:
    """Of a request of the engine start that is shown, both by its engine's clock."""
    hello = session.mirror.hello
    if hello is None:
        return UNKNOWN
    return reader.of((hello.epoch, number), admitted_ns + hello.wall_time_ns - hello.time_ns)


def has_first_token(frame: Frame, who: Who) -> bool:
    """Whether request `who` has a token after this step."""
    epoch, number = who
    if frame.epoch != epoch or number.to_bytes(4, "little") not in frame.requests.number:
        return False
    places = np.flatnonzero(np.frombuffer(frame.requests.number, "<u4") == number)
    tokens = np.frombuffer(frame.requests.num_output_tokens, "<u4")
    return bool(places.size and places[0] < tokens.size and tokens[places[0]] > 0)

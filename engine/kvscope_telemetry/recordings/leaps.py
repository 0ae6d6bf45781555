"""Leaps: the frames of a second or two joined into one, so that a seek goes from leap to leap and not step by step.

Owns what changed since the last. A leap says how all that changed stands at its end, once however often it changed; it
is made from the messages that are recorded.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import numpy as np

from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import Frame, RequestRows, Snapshot, TelemetryMessage
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.request_mirror import RequestMirror

LEAP_NS: Final = 1_800_000_000
LEAP_FRAMES: Final = 400
"""A leap is due after so much time (two bundles), or so many frames: what is left to replay one by one."""


class Leaps:
    """Call `after` with every message, once `follower` was fed with it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._last_ns = 0
        self._begin(0, 0)
        self._is_lost = True

    def after(self, message: TelemetryMessage, log_time_ns: int) -> Leap | None:
        """The leap that ends with `message`, None when none is due."""
        if isinstance(message, Frame):
            if not self._is_lost and not self._follower.is_lost:
                self._frames.append(message)
                self._last_ns = log_time_ns
                if len(self._frames) >= LEAP_FRAMES or log_time_ns - self._since_ns >= LEAP_NS:
                    return self._leap(message, log_time_ns)
        elif isinstance(message, Snapshot):
            self._is_lost = False
            self._begin(message.seq, log_time_ns)
        return None

    def now(self) -> Leap | None:
        """The leap that ends with what came last, due or not; None where nothing changed since the last, or the state
        is not known."""
        if not self._frames or self._is_lost or self._follower.is_lost:
            return None
        return self._leap(self._frames[-1], self._last_ns)

    def restart(self, seq: int, log_time_ns: int) -> None:
        """The state after frame `seq` is in the recording: the next leap begins there."""
        self._begin(seq, log_time_ns)

    def _begin(self, seq: int, log_time_ns: int) -> None:
        self._since_seq, self._since_ns = seq, log_time_ns
        self._frames: list[Frame] = []

    def _leap(self, last: Frame, log_time_ns: int) -> Leap | None:
        self._follower.settle()
        if self._follower.is_lost:
            self._is_lost = True
            return None
        mirror = self._follower.mirror
        ids = np.unique(np.frombuffer(b"".join([frame.blocks.ids for frame in self._frames]), "<u4"))
        leap = Leap(
            epoch=last.epoch,
            seq=last.seq,
            since_seq=self._since_seq,
            step=last.step,
            time_ns=last.time_ns,
            blocks=mirror.ledger.pack(ids),
            new_requests=tuple(chain.from_iterable([frame.new_requests for frame in self._frames])),
            requests=_rows_of(mirror.requests, [frame.requests for frame in self._frames]),
            counters=last.counters,
        )
        self._begin(last.seq, log_time_ns)
        return leap


def _rows_of(requests: RequestMirror, changes: list[RequestRows]) -> RequestRows:
    """How the requests of `changes` stand: of their block tables what may have changed, each once."""
    numbers = np.frombuffer(b"".join([rows.number for rows in changes]), "<u4").astype(np.int64)
    starts = np.frombuffer(b"".join([rows.table_start for rows in changes]), "<u4").astype(np.int64)
    touched, inverse = np.unique(numbers, return_inverse=True)
    first = np.full(touched.size, np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, starts)
    found = [(requests.row_of(number), start) for number, start in zip(touched.tolist(), first.tolist(), strict=True)]
    known = [(row, start) for row, start in found if row is not None]  # others ended and are forgotten
    rows = np.array([row for row, _ in known], np.intp)
    kept = np.array([start for _, start in known], np.int64)
    return requests.pack(rows, np.minimum(kept, requests.num_blocks[rows]))

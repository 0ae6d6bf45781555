"""Detects when requests first ran and got their first token, packed as in summaries.

Times are on the engine's clock, unlike those of phases (`request_phases`), with which they share the packed format.
After a seek, views use these times for everything before the new position. Nothing is detected or guessed for a request
that ran before telemetry was received.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from kvscope_telemetry.messages.telemetry import Frame, RequestRows, Snapshot
from kvscope_telemetry.request_phase import ENDS
from kvscope_telemetry.summaries.request_phases import PHASE


class RequestMoment(IntEnum):
    """Kind of a row in `SessionOverview.moments`. The row's time is on the engine's clock."""

    STARTED = 0
    FIRST_TOKEN = 1


class FirstTokens:
    """Detects the requests that get their first token in a frame. Feed it every snapshot and frame of one engine
    start, in order.
    """

    def __init__(self) -> None:
        self._without_token: set[int] = set()

    def snapshot(self, snapshot: Snapshot) -> None:
        """Reset to the requests of `snapshot` that have no output token yet. After a gap in the telemetry, some
        requests may have received their first token unobserved.
        """
        self._without_token = {number for number, output in _outputs(snapshot.requests) if not output}

    def frame(self, frame: Frame) -> list[int]:
        """Return the numbers of requests that got their first token in this frame's step."""
        self._without_token.update(info.number for info in frame.new_requests)
        found = self._with_new_token(frame.requests)
        self._without_token.difference_update(found)  # including those whose first token was not observed
        self._without_token.difference_update(event.number for event in frame.events if event.kind in ENDS)
        # A frame without `first_token_ns` has no first tokens: `found` got theirs earlier, unobserved.
        return found if frame.first_token_ns else []

    def _with_new_token(self, rows: RequestRows) -> list[int]:
        if self._without_token.isdisjoint(memoryview(rows.number).cast("I")):  # the common case
            return []
        numbers = np.frombuffer(rows.number, "<u4")[np.frombuffer(rows.num_output_tokens, "<u4") > 0]
        return [number for number in numbers.tolist() if number in self._without_token]


class MomentRecorder:
    """Collects the times at which requests first ran and got their first token. Feed it every snapshot and
    frame in order; `drain` returns the times packed as `PHASE`, with a `RequestMoment` as kind.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, int, int]] = []
        self._first_tokens = FirstTokens()

    def drain(self) -> bytes:
        moments, self._pending = self._pending, []
        return np.array(moments, PHASE).tobytes()

    def snapshot(self, snapshot: Snapshot) -> None:
        self._first_tokens.snapshot(snapshot)

    def frame(self, frame: Frame) -> None:
        for event in frame.events:
            if event.kind == "admitted" and 0 < event.number < 1 << 32:
                self._pending.append((event.time_ns, event.number, RequestMoment.STARTED))
        for number in self._first_tokens.frame(frame):
            self._pending.append((frame.time_ns, number, RequestMoment.FIRST_TOKEN))


def _outputs(rows: RequestRows) -> list[tuple[int, int]]:
    numbers, outputs = np.frombuffer(rows.number, "<u4").tolist(), np.frombuffer(rows.num_output_tokens, "<u4")
    return list(zip(numbers, outputs.tolist(), strict=False))

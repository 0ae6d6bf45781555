"""When requests first ran and got their first token, on their engine's clock, packed as in summaries.

After a jump to another moment these say what happened before it. Owns how the moments are detected. For a request that
ran before anybody listened there is nothing to detect, and nothing is guessed.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from kvscope_telemetry.messages.telemetry import Frame, RequestRows, Snapshot
from kvscope_telemetry.summaries.request_phases import PHASE

_ENDS = ("finished", "aborted", "refused")


class RequestMoment(IntEnum):
    """Which moment of a request a row of `SessionOverview.moments` is; its time is by the engine's clock."""

    STARTED = 0
    FIRST_TOKEN = 1


class FirstTokens:
    """Who gets a first token in a frame. Tell it every snapshot and frame of one engine start, in order."""

    def __init__(self) -> None:
        self._without: set[int] = set()

    def snapshot(self, snapshot: Snapshot) -> None:
        """Who has none yet; through a hole some may have come unseen."""
        self._without = {number for number, output in _outputs(snapshot.requests) if not output}

    def frame(self, frame: Frame) -> list[int]:
        """Numbers of those who got one in this step."""
        self._without.update(info.number for info in frame.new_requests)
        found = self._answering(frame.requests)
        self._without.difference_update(found)  # of those whose first token came unseen as well
        self._without.difference_update(event.number for event in frame.events if event.kind in _ENDS)
        return found if frame.first_token_ns else []

    def _answering(self, rows: RequestRows) -> list[int]:
        """Numbers of those that had no token and have one now."""
        if self._without.isdisjoint(memoryview(rows.number).cast("I")):  # most of all
            return []
        numbers = np.frombuffer(rows.number, "<u4")[np.frombuffer(rows.num_output_tokens, "<u4") > 0]
        return [number for number in numbers.tolist() if number in self._without]


class MomentNotes:
    """Tell it every snapshot and frame in order; `take` gives what was noticed, packed as `PHASE`."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, int, int]] = []
        self._first_tokens = FirstTokens()

    def take(self) -> bytes:
        """Since the last call."""
        noted, self._noted = self._noted, []
        return np.array(noted, PHASE).tobytes()

    def snapshot(self, snapshot: Snapshot) -> None:
        """Who is there."""
        self._first_tokens.snapshot(snapshot)

    def frame(self, frame: Frame) -> None:
        """Who first ran, and who got a first token."""
        for event in frame.events:
            if event.kind == "admitted" and 0 < event.number < 1 << 32:
                self._noted.append((event.time_ns, event.number, RequestMoment.STARTED))
        for number in self._first_tokens.frame(frame):
            self._noted.append((frame.time_ns, number, RequestMoment.FIRST_TOKEN))


def _outputs(rows: RequestRows) -> list[tuple[int, int]]:
    """Number of each request, and how many tokens it has generated."""
    numbers, outputs = np.frombuffer(rows.number, "<u4").tolist(), np.frombuffer(rows.num_output_tokens, "<u4")
    return list(zip(numbers, outputs.tolist(), strict=False))

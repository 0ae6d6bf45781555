"""When each request got its first and its newest token, and how it ended, as seen in the updates. Knows no Qt.

The mirror holds how many tokens a request has, not when they came. A ring indexed by request number keeps the
newest `capacity` requests of the epoch; times are those of frames, by the engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, RequestRows
from kvscope_telemetry.request_log import ENDINGS, Ending
from kvscope_telemetry.summaries.moments import RequestMoment
from kvscope_telemetry.summaries.request_phases import PhaseRows

IntArray = npt.NDArray[np.int64]
_UNSEEN: Final = -2
"""It was before anybody looked: what is seen later is not the first."""
FloatArray = npt.NDArray[np.float64]


class RequestTimes:
    """First and newest token, and the end, of the newest `capacity` request numbers."""

    def __init__(self, capacity: int = 32_768) -> None:
        self._capacity = capacity
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the ring."""
        columns = (self._number, self._num_tokens, self._started_ns, self._first_ns, self._last_ns, self._ending)
        return sum(column.nbytes for column in columns)

    def clear(self) -> None:
        """Forget all: a new epoch counts its requests from 1 again."""
        self._number = np.zeros(self._capacity, np.int64)
        self._num_tokens = np.zeros(self._capacity, np.int64)
        self._started_ns = np.full(self._capacity, -1)
        self._first_ns = np.full(self._capacity, -1)
        self._last_ns = np.full(self._capacity, -1)
        self._ending = np.zeros(self._capacity, np.uint8)

    def add(self, rows: RequestRows, time_ns: int | IntArray) -> None:
        """Take in changed requests as they were at `time_ns`: of all rows, or of each, which may be about the same
        request several times, oldest first."""
        numbers = np.frombuffer(rows.number, "<u4").astype(np.int64)
        tokens = np.frombuffer(rows.num_output_tokens, "<u4").astype(np.int64)
        times = np.broadcast_to(np.asarray(time_ns, np.int64), numbers.shape)
        slots = numbers % self._capacity
        is_new = self._number[slots] != numbers
        fresh = slots[is_new]
        self._number[fresh], self._num_tokens[fresh] = numbers[is_new], 0
        self._started_ns[fresh] = self._first_ns[fresh] = self._last_ns[fresh] = -1
        self._ending[fresh] = Ending.UNKNOWN
        runs = (_states(rows) == RequestState.RUNNING) & (self._started_ns[slots] == -1)
        _put_first(self._started_ns, slots[runs], times[runs])
        before = self._tokens_before(slots, tokens)
        has_first = (before == 0) & (tokens > 0) & (self._first_ns[slots] == -1)
        _put_first(self._first_ns, slots[has_first], times[has_first])
        grown = tokens > before
        self._last_ns[slots[grown]] = times[grown]
        self._num_tokens[slots] = tokens

    def _tokens_before(self, slots: IntArray, tokens: IntArray) -> IntArray:
        """How many each row's request had in its row before."""
        before = self._num_tokens[slots]
        if slots.size > 1:
            order = np.argsort(slots, kind="stable")
            again = order[1:][slots[order[1:]] == slots[order[:-1]]]
            earlier = order[:-1][slots[order[1:]] == slots[order[:-1]]]
            before[again] = tokens[earlier]
        return before

    def hear(self, events: Iterable[Event]) -> None:
        """Take in when requests were admitted, exactly, and of those as well whose first step nobody saw; and how they
        ended."""
        for event in events:
            slot = event.number % self._capacity
            if self._number[slot] != event.number:
                continue
            if event.kind == "admitted":
                self._started_ns[slot] = event.time_ns
            elif event.kind in ENDINGS:
                self._ending[slot] = ENDINGS[event.kind]

    def know(self, moments: PhaseRows) -> None:
        """Take in rows of `Course.moments` of this epoch: what was before anybody looked here."""
        slots = moments["number"].astype(np.int64) % self._capacity
        is_known = self._number[slots] == moments["number"]
        for kind, column in ((RequestMoment.STARTED, self._started_ns), (RequestMoment.FIRST_TOKEN, self._first_ns)):
            known = is_known & (moments["kind"] == kind) & (column[slots] < 0)
            column[slots[known]] = moments["time_ns"][known]

    def skip(self, rows: RequestRows) -> None:
        """Take in a snapshot's requests: the tokens they have came at times nobody saw."""
        numbers = np.frombuffer(rows.number, "<u4").astype(np.int64)
        slots = numbers % self._capacity
        is_unseen = self._number[slots] != numbers
        unseen = slots[is_unseen]
        self._number[slots] = numbers
        self._num_tokens[slots] = np.frombuffer(rows.num_output_tokens, "<u4")
        outputs = self._num_tokens[slots]
        came_unseen = slots[(outputs > 0) & (is_unseen | (self._first_ns[slots] == -1))]
        self._first_ns[unseen] = self._last_ns[unseen] = -1
        self._first_ns[came_unseen] = _UNSEEN
        self._ending[unseen] = Ending.UNKNOWN
        self._started_ns[unseen] = np.where(_states(rows)[is_unseen] == RequestState.WAITING, -1, _UNSEEN)

    def started_ns(self, numbers: IntArray) -> IntArray:
        """Engine time when each request first ran, shape of `numbers`; negative before, and where it was not seen."""
        return self._look_up(self._started_ns, numbers)

    def first_token_ns(self, numbers: IntArray) -> IntArray:
        """Engine time of each request's first token, shape of `numbers`; -1 where it was not seen."""
        return np.maximum(self._look_up(self._first_ns, numbers), -1)

    def last_token_ns(self, numbers: IntArray) -> IntArray:
        """Engine time of each request's newest token, shape of `numbers`; -1 where none was seen."""
        return self._look_up(self._last_ns, numbers)

    def endings(self, numbers: IntArray) -> IntArray:
        """How each request ended, an `Ending`, shape of `numbers`."""
        slots = numbers % self._capacity
        ended: IntArray = np.where(self._number[slots] == numbers, self._ending[slots], Ending.UNKNOWN).astype(np.int64)
        return ended

    def _look_up(self, column: IntArray, numbers: IntArray) -> IntArray:
        slots = numbers % self._capacity
        return np.where(self._number[slots] == numbers, column[slots], -1)


def _put_first(column: IntArray, slots: IntArray, times: IntArray) -> None:
    """The first time of each slot."""
    column[slots[::-1]] = times[::-1]


def _states(rows: RequestRows) -> npt.NDArray[np.uint8]:
    """As many as there are numbers; WAITING where the rows do not say."""
    return np.frombuffer(rows.state or bytes(len(rows.number) // 4), "u1")

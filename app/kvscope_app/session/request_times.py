"""Start, first-token, last-token and end state of each request, observed from updates. Imports no Qt.

The mirror has the number of tokens of a request but not their times. A ring indexed by request number retains the
newest `capacity` requests of the epoch. Times are frame times on the engine's clock.
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
_UNOBSERVED: Final = -2
"""Value of a time that passed before observation began. Being set, it is not replaced by the time of a later
token or step.
"""
FloatArray = npt.NDArray[np.float64]


class RequestTimes:
    def __init__(self, capacity: int = 32_768) -> None:
        self._capacity = capacity
        self.clear()

    @property
    def num_bytes(self) -> int:
        columns = (self._number, self._num_tokens, self._started_ns, self._first_ns, self._last_ns, self._ending)
        return sum(column.nbytes for column in columns)

    def clear(self) -> None:
        """Remove all requests. Call it for a new epoch, which numbers its requests from 1."""
        self._number = np.zeros(self._capacity, np.int64)
        self._num_tokens = np.zeros(self._capacity, np.int64)
        self._started_ns = np.full(self._capacity, -1)
        self._first_ns = np.full(self._capacity, -1)
        self._last_ns = np.full(self._capacity, -1)
        self._ending = np.zeros(self._capacity, np.uint8)

    def add_rows(self, rows: RequestRows, time_ns: int | IntArray) -> None:
        """Add changed requests, observed at `time_ns`: one time for all rows, or one per row.

        `rows` may contain the same request several times, oldest row first.
        """
        numbers = np.frombuffer(rows.number, "<u4").astype(np.int64)
        tokens = np.frombuffer(rows.num_output_tokens, "<u4").astype(np.int64)
        times = np.broadcast_to(np.asarray(time_ns, np.int64), numbers.shape)
        slots = numbers % self._capacity
        is_new = self._number[slots] != numbers
        new_slots = slots[is_new]
        self._number[new_slots], self._num_tokens[new_slots] = numbers[is_new], 0
        self._started_ns[new_slots] = self._first_ns[new_slots] = self._last_ns[new_slots] = -1
        self._ending[new_slots] = Ending.UNKNOWN
        is_first_run = (_states(rows) == RequestState.RUNNING) & (self._started_ns[slots] == -1)
        _set_first(self._started_ns, slots[is_first_run], times[is_first_run])
        before = self._tokens_before(slots, tokens)
        has_first = (before == 0) & (tokens > 0) & (self._first_ns[slots] == -1)
        _set_first(self._first_ns, slots[has_first], times[has_first])
        has_new_tokens = tokens > before
        self._last_ns[slots[has_new_tokens]] = times[has_new_tokens]
        self._num_tokens[slots] = tokens

    def _tokens_before(self, slots: IntArray, tokens: IntArray) -> IntArray:
        """Return, for each row, the number of tokens that its request had before the update that the row describes."""
        before = self._num_tokens[slots]
        if slots.size > 1:
            order = np.argsort(slots, kind="stable")
            repeated = order[1:][slots[order[1:]] == slots[order[:-1]]]
            earlier = order[:-1][slots[order[1:]] == slots[order[:-1]]]
            before[repeated] = tokens[earlier]
        return before

    def add_events(self, events: Iterable[Event]) -> None:
        """Set end states and admission times from events.

        Event times are exact, and are known even if a request's first step was not observed.
        """
        for event in events:
            slot = event.number % self._capacity
            if self._number[slot] != event.number:
                continue
            if event.kind == "admitted":
                self._started_ns[slot] = event.time_ns
            elif event.kind in ENDINGS:
                self._ending[slot] = ENDINGS[event.kind]

    def add_moments(self, moments: PhaseRows) -> None:
        """Add times from before observation began: rows of `SessionOverview.moments` of this epoch."""
        slots = moments["number"].astype(np.int64) % self._capacity
        is_known = self._number[slots] == moments["number"]
        for kind, column in ((RequestMoment.STARTED, self._started_ns), (RequestMoment.FIRST_TOKEN, self._first_ns)):
            known = is_known & (moments["kind"] == kind) & (column[slots] < 0)
            column[slots[known]] = moments["time_ns"][known]

    def add_snapshot(self, rows: RequestRows) -> None:
        """Add the requests of a snapshot. The times of their existing tokens are unknown."""
        numbers = np.frombuffer(rows.number, "<u4").astype(np.int64)
        slots = numbers % self._capacity
        is_unseen = self._number[slots] != numbers
        unseen = slots[is_unseen]
        self._number[slots] = numbers
        self._num_tokens[slots] = np.frombuffer(rows.num_output_tokens, "<u4")
        outputs = self._num_tokens[slots]
        has_unobserved_tokens = slots[(outputs > 0) & (is_unseen | (self._first_ns[slots] == -1))]
        self._first_ns[unseen] = self._last_ns[unseen] = -1
        self._first_ns[has_unobserved_tokens] = _UNOBSERVED
        self._ending[unseen] = Ending.UNKNOWN
        self._started_ns[unseen] = np.where(_states(rows)[is_unseen] == RequestState.WAITING, -1, _UNOBSERVED)

    def started_ns(self, numbers: IntArray) -> IntArray:
        """Return the engine time at which each request first ran, shape of `numbers`.

        Negative if the request has not run or its start was not observed.
        """
        return self._column_values(self._started_ns, numbers)

    def first_token_ns(self, numbers: IntArray) -> IntArray:
        """Return the engine time of each request's first token, shape of `numbers`; -1 if not observed."""
        return np.maximum(self._column_values(self._first_ns, numbers), -1)

    def last_token_ns(self, numbers: IntArray) -> IntArray:
        """Return the engine time of each request's newest token, shape of `numbers`; -1 if not observed."""
        return self._column_values(self._last_ns, numbers)

    def endings(self, numbers: IntArray) -> IntArray:
        """Return the `Ending` of each request, shape of `numbers`."""
        slots = numbers % self._capacity
        endings: IntArray = np.where(self._number[slots] == numbers, self._ending[slots], Ending.UNKNOWN).astype(
            np.int64
        )
        return endings

    def _column_values(self, column: IntArray, numbers: IntArray) -> IntArray:
        slots = numbers % self._capacity
        return np.where(self._number[slots] == numbers, column[slots], -1)


def _set_first(column: IntArray, slots: IntArray, times: IntArray) -> None:
    """Set `column` at `slots` to `times`. For a repeated slot, the first time is written."""
    column[slots[::-1]] = times[::-1]


def _states(rows: RequestRows) -> npt.NDArray[np.uint8]:
    """Return the state of each row, or WAITING for every row if `rows` has no states."""
    return np.frombuffer(rows.state or bytes(len(rows.number) // 4), "u1")

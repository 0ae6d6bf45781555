"""Filters and sorts all requests of the table with numpy. Imports no Qt.

Latencies and counts are those of a request's whole life, as far as it is recorded. Its state, its blocks and the
progress of its prompt and output are those of the moment shown (`at_moment`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.session.request_times import RequestTimes
from kvscope_app.session.time_span import TimeSpan
from kvscope_telemetry.latencies import running_s, tokens_per_s
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.request_log import SHARE_OF, Ending, RequestColumns, cached_share
from kvscope_telemetry.slo import GoalResults, Goals, judge

FloatArray = npt.NDArray[np.float64]
NOT_YET: Final = 254
"""State code used instead of a `RequestState` for a request that arrives after the moment shown."""


class Filter(StrEnum):
    """Choices of the filter of the request table."""

    ALL = "All"
    RUNNING = "Running"
    WAITING = "Waiting"
    FINISHED = "Ended"
    MISSED = "Missed goals"
    PREEMPTED = "Preempted"
    ABORTED = "Aborted"
    IN_RANGE = "In visible range"


FILTER_TIPS: Final = {
    Filter.ALL: "All requests that are known, whatever moment is shown",
    Filter.RUNNING: "Requests that run at the moment shown",
    Filter.WAITING: "Requests that wait, or were preempted, at the moment shown",
    Filter.FINISHED: "Requests that have ended by the moment shown",
    Filter.MISSED: "Finished requests that missed a latency goal",
    Filter.PREEMPTED: "Requests that were preempted at least once",
    Filter.ABORTED: "Requests that were aborted or refused",
    Filter.IN_RANGE: "Requests that were there in the time to which the linked views are zoomed",
}
_CLIENT: Final = re.compile(r"client\s+(\d{1,9})")
_STATES: Final = {
    Filter.RUNNING: (RequestState.RUNNING,),
    Filter.WAITING: (RequestState.WAITING, RequestState.PREEMPTED),
    Filter.FINISHED: (RequestState.FINISHED,),
}


def at_moment(columns: RequestColumns, mirror: Mirror, cursor_ns: int) -> RequestColumns:
    """Return `columns` with the states, blocks and progress of the moment shown, `cursor_ns` by the wall clock."""
    if mirror.hello is None or not len(columns):
        return columns
    requests = mirror.requests
    state = np.where(columns.arrival_ns > cursor_ns, NOT_YET, RequestState.FINISHED)
    has_come = state != NOT_YET
    computed = np.where(has_come, columns.num_computed_tokens, 0)
    output, blocks = np.where(has_come, columns.num_output_now, 0), np.zeros(len(columns), np.int64)
    own = np.flatnonzero(columns.epoch == mirror.epoch)
    if own.size and len(requests):
        numbers = columns.number[own]
        at = np.minimum(np.searchsorted(requests.number, numbers), len(requests) - 1)
        is_known = requests.number[at] == numbers
        rows, at = own[is_known], at[is_known]
        state[rows], computed[rows] = requests.state[at], requests.num_computed_tokens[at]
        output[rows], blocks[rows] = requests.num_output_tokens[at], requests.num_held[at]
    return replace(columns, state=state, num_computed_tokens=computed, num_output_now=output, num_blocks=blocks)


def read_columns(mirror: Mirror, times: RequestTimes, part: slice = slice(None)) -> RequestColumns:
    """Return the requests of a mirror, or those in `part` of its rows, up to the mirror's time."""
    requests = mirror.requests
    number = requests.number[part].astype(np.int64)
    first, last = times.first_token_ns(number), times.last_token_ns(number)
    arrival, finished = requests.arrival_ns[part], requests.finished_ns[part]
    end = np.where(finished >= 0, finished, np.maximum(mirror.time_ns, arrival))
    goes_on = np.isin(requests.state[part], (RequestState.RUNNING, RequestState.FINISHED))
    newest = np.where(goes_on, end, -1)  # if the last token was not seen: a running request gets one per step
    started = times.started_ns(number)
    still_waits = (started < 0) & (requests.state[part] == RequestState.WAITING)
    counted = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_output_tokens")
    others = ("client", "state", "max_tokens", "num_preemptions", "num_draft_tokens", "num_accepted_tokens")
    offset_ns = 0 if mirror.hello is None else mirror.hello.wall_time_ns - mirror.hello.time_ns
    return RequestColumns(
        request_ids=requests.request_ids[part],
        adapters=requests.adapters[part],
        key=number,
        epoch=np.full(number.size, mirror.epoch or 0),
        number=number,
        arrival_ns=arrival + offset_ns,
        end_ns=np.maximum(end, arrival) + offset_ns,
        has_ended=requests.state[part] == RequestState.FINISHED,
        tokens_per_s=tokens_per_s(
            requests.num_output_tokens[part], first, np.where(last >= 0, last, newest), mirror.stops
        ),
        ttft_s=running_s(arrival, first, mirror.stops),
        queue_s=running_s(arrival, np.where(still_waits, end, started), mirror.stops),
        time_s=running_s(arrival, end, mirror.stops),
        aside_s=np.zeros(number.size),
        cached_share=cached_share(*(getattr(requests, name)[part] for name in SHARE_OF)),
        ending=times.endings(number),
        num_blocks=requests.num_held[part].astype(np.int64),
        num_output_now=requests.num_output_tokens[part].astype(np.int64),
        **{name: getattr(requests, name)[part].astype(np.int64) for name in counted + others},
    )


def latencies_s(columns: RequestColumns) -> dict[str, FloatArray]:
    """Return the latencies that goals refer to, in seconds per request, keyed as in `goals.latencies_s`."""
    tpot_s = np.where(columns.num_output_tokens > 1, columns.tpot_s, 0.0)
    return {"ttft": columns.ttft_s, "tpot": tpot_s, "e2el": columns.time_s}


def judged(columns: RequestColumns, goals: Goals) -> GoalResults:
    """Judge the requests that finished. Unfinished, aborted and refused ones count neither as met nor as missed."""
    has_finished = columns.has_ended & np.isin(columns.ending, (Ending.UNKNOWN, Ending.FINISHED))
    found = judge(latencies_s(columns), goals)
    return GoalResults(found.kept & has_finished, found.missed & has_finished)


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Which requests are shown: those of `filter` that match `text`."""

    filter: Filter = Filter.ALL
    text: str = ""
    goals: Goals = field(default_factory=dict)
    """Latency goals, for `Filter.MISSED`."""
    visible: TimeSpan | None = None
    """Time range, for `Filter.IN_RANGE`; None: no restriction."""


def order_rows(columns: RequestColumns, wanted: RequestQuery, sort_by: str, descending: bool) -> npt.NDArray[np.intp]:
    """Return the rows of the matching requests, sorted; equal ones newest first, unknown values last."""
    matching, text = _matches(columns, wanted), wanted.text
    if text:
        matching &= _matches_text(columns, text)
    rows = np.flatnonzero(matching)[::-1]
    if sort_by in ("request_ids", "adapters"):
        words = getattr(columns, sort_by)
        keys: npt.NDArray[np.generic] = np.array([words[row] for row in rows.tolist()], np.str_)
        order = np.argsort(keys, kind="stable")
        return rows[order[::-1] if descending else order]
    values = getattr(columns, sort_by)[rows].astype(np.float64)
    values = np.where(np.isnan(values), np.inf, -values if descending else values)
    return rows[np.argsort(values, kind="stable")]


def _matches(columns: RequestColumns, wanted: RequestQuery) -> npt.NDArray[np.bool_]:
    if wanted.filter in _STATES:
        return np.isin(columns.state, _STATES[wanted.filter])
    if wanted.filter is Filter.MISSED:
        return judged(columns, wanted.goals).missed
    if wanted.filter is Filter.PREEMPTED:
        return columns.num_preemptions > 0
    if wanted.filter is Filter.ABORTED:
        return np.isin(columns.ending, (Ending.ABORTED, Ending.REFUSED))
    if wanted.filter is Filter.IN_RANGE and wanted.visible is not None:
        is_there: npt.NDArray[np.bool_] = columns.arrival_ns <= wanted.visible.end_ns
        return is_there & (columns.end_ns >= wanted.visible.begin_ns)
    return np.ones(len(columns), np.bool_)


def _matches_text(columns: RequestColumns, text: str) -> npt.NDArray[np.bool_]:
    """Match a part of the id or of the adapter's name, the number with or without #, or `client 3`."""
    wanted = text.strip().lower()
    if client := _CLIENT.fullmatch(wanted):
        is_its: npt.NDArray[np.bool_] = columns.client == int(client.group(1))
        return is_its
    number = wanted.removeprefix("#")
    names = zip(columns.request_ids, columns.adapters, strict=True)
    by_id = np.fromiter(
        (wanted in name.lower() or wanted in whose.lower() for name, whose in names), bool, len(columns)
    )
    return by_id | (columns.number == int(number)) if number.isdecimal() else by_id

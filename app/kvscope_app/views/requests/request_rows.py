"""Filters and sorts the rows of the request table with numpy. Imports no Qt.

Latencies and counts cover a request's whole life, as far as it is recorded. State, blocks and progress are those at the
time shown (`at_moment`).
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
"""State code of a request that arrives after the time shown, in place of a `RequestState`."""


class Filter(StrEnum):
    ALL = "All"
    RUNNING = "Running"
    WAITING = "Waiting"
    FINISHED = "Ended"
    MISSED = "Missed goals"
    PREEMPTED = "Preempted"
    ABORTED = "Aborted"
    IN_RANGE = "In visible range"


FILTER_TIPS: Final = {
    Filter.ALL: "All known requests, whatever time is shown",
    Filter.RUNNING: "Requests that run at the time shown",
    Filter.WAITING: "Requests that wait at the time shown, including preempted ones",
    Filter.FINISHED: "Requests that have ended by the time shown",
    Filter.MISSED: "Finished requests that missed a latency goal",
    Filter.PREEMPTED: "Requests that were preempted at least once",
    Filter.ABORTED: "Requests that were aborted or refused",
    Filter.IN_RANGE: "Requests that existed in the time range to which the linked views are zoomed",
}
_CLIENT: Final = re.compile(r"client\s+(\d{1,9})")
_STATES: Final = {
    Filter.RUNNING: (RequestState.RUNNING,),
    Filter.WAITING: (RequestState.WAITING, RequestState.PREEMPTED),
    Filter.FINISHED: (RequestState.FINISHED,),
}


def at_moment(columns: RequestColumns, mirror: Mirror, cursor_ns: int) -> RequestColumns:
    """Return `columns` with the states, blocks and progress at the time shown, which `cursor_ns` gives in wall-clock
    ns.
    """
    if mirror.hello is None or not len(columns):
        return columns
    requests = mirror.requests
    state = np.where(columns.arrival_ns > cursor_ns, NOT_YET, RequestState.FINISHED)
    has_arrived = state != NOT_YET
    computed = np.where(has_arrived, columns.num_computed_tokens, 0)
    output, blocks = np.where(has_arrived, columns.num_output_now, 0), np.zeros(len(columns), np.int64)
    in_epoch = np.flatnonzero(columns.epoch == mirror.epoch)
    if in_epoch.size and len(requests):
        numbers = columns.number[in_epoch]
        mirror_rows = np.minimum(np.searchsorted(requests.number, numbers), len(requests) - 1)
        is_known = requests.number[mirror_rows] == numbers
        rows, mirror_rows = in_epoch[is_known], mirror_rows[is_known]
        state[rows], computed[rows] = requests.state[mirror_rows], requests.num_computed_tokens[mirror_rows]
        output[rows], blocks[rows] = requests.num_output_tokens[mirror_rows], requests.num_held[mirror_rows]
    return replace(columns, state=state, num_computed_tokens=computed, num_output_now=output, num_blocks=blocks)


def read_columns(mirror: Mirror, times: RequestTimes, part: slice = slice(None)) -> RequestColumns:
    """Return the requests of a mirror as columns, up to the mirror's time. `part` selects rows of `mirror.requests`."""
    requests = mirror.requests
    number = requests.number[part].astype(np.int64)
    first, last = times.first_token_ns(number), times.last_token_ns(number)
    arrival, finished = requests.arrival_ns[part], requests.finished_ns[part]
    end = np.where(finished >= 0, finished, np.maximum(mirror.time_ns, arrival))
    is_running_or_ended = np.isin(requests.state[part], (RequestState.RUNNING, RequestState.FINISHED))
    # if the last token was not seen: a running request gets one per step
    assumed_last = np.where(is_running_or_ended, end, -1)
    started = times.started_ns(number)
    is_waiting = (started < 0) & (requests.state[part] == RequestState.WAITING)
    count_names = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_output_tokens")
    other_names = ("client", "state", "max_tokens", "num_preemptions", "num_draft_tokens", "num_accepted_tokens")
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
            requests.num_output_tokens[part], first, np.where(last >= 0, last, assumed_last), mirror.stops
        ),
        ttft_s=running_s(arrival, first, mirror.stops),
        queue_s=running_s(arrival, np.where(is_waiting, end, started), mirror.stops),
        time_s=running_s(arrival, end, mirror.stops),
        preempted_s=np.zeros(number.size),
        cached_share=cached_share(*(getattr(requests, name)[part] for name in SHARE_OF)),
        ending=times.endings(number),
        num_blocks=requests.num_held[part].astype(np.int64),
        num_output_now=requests.num_output_tokens[part].astype(np.int64),
        **{name: getattr(requests, name)[part].astype(np.int64) for name in count_names + other_names},
    )


def latencies_s(columns: RequestColumns) -> dict[str, FloatArray]:
    """Return the latencies to which goals refer, in seconds per request, with the keys of `slo.GOAL_NAMES`."""
    tpot_s = np.where(columns.num_output_tokens > 1, columns.tpot_s, 0.0)
    return {"ttft": columns.ttft_s, "tpot": tpot_s, "e2el": columns.time_s}


def judge_requests(columns: RequestColumns, goals: Goals) -> GoalResults:
    """Return which finished requests met the goals and which missed them. Unfinished, aborted and refused requests are
    in neither group.
    """
    has_finished = columns.has_ended & np.isin(columns.ending, (Ending.UNKNOWN, Ending.FINISHED))
    results = judge(latencies_s(columns), goals)
    return GoalResults(results.met & has_finished, results.missed & has_finished)


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Query that selects the requests shown in the table: those that pass `filter` and match `text`."""

    filter: Filter = Filter.ALL
    text: str = ""
    goals: Goals = field(default_factory=dict)
    visible_span: TimeSpan | None = None
    """Time range to which `Filter.IN_RANGE` restricts requests; None for no restriction."""


def order_rows(columns: RequestColumns, query: RequestQuery, sort_by: str, is_descending: bool) -> npt.NDArray[np.intp]:
    """Return the indices in `columns` of the matching requests, sorted by column `sort_by`. Equal values are newest
    first; unknown values are last.
    """
    matching, text = _matches(columns, query), query.text
    if text:
        matching &= _matches_text(columns, text)
    rows = np.flatnonzero(matching)[::-1]
    if sort_by in ("request_ids", "adapters"):
        texts = getattr(columns, sort_by)
        keys: npt.NDArray[np.generic] = np.array([texts[row] for row in rows.tolist()], np.str_)
        order = np.argsort(keys, kind="stable")
        return rows[order[::-1] if is_descending else order]
    values = getattr(columns, sort_by)[rows].astype(np.float64)
    values = np.where(np.isnan(values), np.inf, -values if is_descending else values)
    return rows[np.argsort(values, kind="stable")]


def _matches(columns: RequestColumns, query: RequestQuery) -> npt.NDArray[np.bool_]:
    if query.filter in _STATES:
        return np.isin(columns.state, _STATES[query.filter])
    if query.filter is Filter.MISSED:
        return judge_requests(columns, query.goals).missed
    if query.filter is Filter.PREEMPTED:
        return columns.num_preemptions > 0
    if query.filter is Filter.ABORTED:
        return np.isin(columns.ending, (Ending.ABORTED, Ending.REFUSED))
    if query.filter is Filter.IN_RANGE and query.visible_span is not None:
        has_arrived: npt.NDArray[np.bool_] = columns.arrival_ns <= query.visible_span.end_ns
        return has_arrived & (columns.end_ns >= query.visible_span.begin_ns)
    return np.ones(len(columns), np.bool_)


def _matches_text(columns: RequestColumns, text: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the requests that match `text`: a part of the id or of the adapter's name, the number with or
    without #, or `client 3`.
    """
    pattern = text.strip().lower()
    if client := _CLIENT.fullmatch(pattern):
        is_from_client: npt.NDArray[np.bool_] = columns.client == int(client.group(1))
        return is_from_client
    number = pattern.removeprefix("#")
    names = zip(columns.request_ids, columns.adapters, strict=True)
    is_match = np.fromiter(
        (pattern in name.lower() or pattern in adapter.lower() for name, adapter in names), bool, len(columns)
    )
    return is_match | (columns.number == int(number)) if number.isdecimal() else is_match

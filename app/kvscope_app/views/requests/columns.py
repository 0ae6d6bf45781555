"""What the request table shows, worked out with numpy for all requests at once. No Qt.

Rows are those of the mirror; filtering and sorting give an order of row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvscope_app.session.request_times import RequestTimes
from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.state.mirror import Mirror

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Filter(StrEnum):
    """Which requests a person wants to see."""

    ALL = "All"
    RUNNING = "Running"
    WAITING = "Waiting"
    FINISHED = "Ended"


_STATES = {
    Filter.ALL: tuple(RequestState),
    Filter.RUNNING: (RequestState.RUNNING,),
    Filter.WAITING: (RequestState.WAITING, RequestState.PREEMPTED),
    Filter.FINISHED: (RequestState.FINISHED,),
}


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Copies, so that a paused table stands still. Each array has shape (num_requests,)."""

    request_ids: list[str]
    number: IntArray
    state: IntArray
    num_prompt_tokens: IntArray
    num_computed_tokens: IntArray
    num_cached_tokens: IntArray
    num_output_tokens: IntArray
    max_tokens: IntArray
    num_blocks: IntArray
    num_preemptions: IntArray
    num_draft_tokens: IntArray
    """Guessed ahead and checked, and those of them that were right."""
    num_accepted_tokens: IntArray
    tokens_per_s: FloatArray
    """Output tokens after the first, over the time they took; NaN before there are two."""
    ttft_s: FloatArray
    """From arrival to the first token; NaN before, and when it came unseen."""
    queue_s: FloatArray
    """From arrival until it first ran, or until now; NaN when that was not seen."""
    time_s: FloatArray
    """From arrival to the end, or until now."""
    ending: IntArray
    """An `Ending`."""

    def __len__(self) -> int:
        return len(self.request_ids)


def read_columns(mirror: Mirror, times: RequestTimes, part: slice = slice(None)) -> RequestColumns:
    """The table's columns as the mirror stands, or some rows of them."""
    requests = mirror.requests
    number = requests.number[part].astype(np.int64)
    first, last = times.first_token_ns(number), times.last_token_ns(number)
    arrival, finished = requests.arrival_ns[part], requests.finished_ns[part]
    end = np.where(finished >= 0, finished, np.maximum(mirror.time_ns, arrival))
    counted = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_output_tokens")
    others = ("state", "max_tokens", "num_blocks", "num_preemptions", "num_draft_tokens", "num_accepted_tokens")
    return RequestColumns(
        request_ids=requests.request_ids[part],
        number=number,
        tokens_per_s=_speed(requests.num_output_tokens[part], first, last),
        ttft_s=np.where(first >= 0, np.maximum(first - arrival, 0) / 1e9, np.nan),
        queue_s=_queued(times.started_ns(number), requests.state[part], arrival, end),
        time_s=np.maximum(end - arrival, 0) / 1e9,
        ending=times.endings(number),
        **{name: getattr(requests, name)[part].astype(np.int64) for name in counted + others},
    )


def order_rows(
    columns: RequestColumns, wanted: Filter, text: str, sort_by: str, descending: bool
) -> npt.NDArray[np.intp]:
    """Rows of the requests that match, sorted; equal ones newest first."""
    matching = np.isin(columns.state, _STATES[wanted])
    if text:
        matching &= _matches_text(columns, text)
    rows = np.flatnonzero(matching)[::-1]
    if sort_by == "request_ids":
        keys: npt.NDArray[np.generic] = np.array([columns.request_ids[row] for row in rows.tolist()], np.str_)
        order = np.argsort(keys, kind="stable")
        return rows[order[::-1] if descending else order]
    values = getattr(columns, sort_by)[rows].astype(np.float64)
    values = np.where(np.isnan(values), np.inf, -values if descending else values)
    return rows[np.argsort(values, kind="stable")]


def _queued(started_ns: IntArray, state: npt.NDArray[np.uint8], arrival_ns: IntArray, end_ns: IntArray) -> FloatArray:
    """Seconds of waiting for the first step."""
    until = np.where(started_ns >= 0, started_ns, end_ns)
    is_known = (started_ns >= 0) | (state == RequestState.WAITING)
    return np.where(is_known, np.maximum(until - arrival_ns, 0) / 1e9, np.nan)


def _speed(num_tokens: IntArray, first_ns: IntArray, last_ns: IntArray) -> FloatArray:
    took_ns = np.where(first_ns >= 0, last_ns - first_ns, 0)
    known = (took_ns > 0) & (num_tokens > 1)
    return np.where(known, (num_tokens - 1) * 1e9 / np.maximum(took_ns, 1), np.nan)


def _matches_text(columns: RequestColumns, text: str) -> npt.NDArray[np.bool_]:
    """Part of the id, or the number with or without #."""
    wanted = text.strip().lower()
    number = wanted.removeprefix("#")
    by_id = np.fromiter((wanted in name.lower() for name in columns.request_ids), bool, len(columns))
    return by_id | (columns.number == int(number)) if number.isdecimal() else by_id

"""What the request table shows, worked out with numpy for all requests at once. No Qt.

Rows are those of the mirror; filtering and sorting give an order of row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvscope_app.session.request_times import Ending, RequestTimes
from kvscope_telemetry.goals import Goals, Judged, judge
from kvscope_telemetry.latencies import running_s, tokens_per_s
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.state.mirror import Mirror

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Filter(StrEnum):
    """Which requests a person wants to see."""

    ALL = "All"
    RUNNING = "Running"
    WAITING = "Waiting"
    FINISHED = "Ended"
    MISSED = "Missed goals"


_STATES = {
    Filter.ALL: tuple(RequestState),
    Filter.RUNNING: (RequestState.RUNNING,),
    Filter.WAITING: (RequestState.WAITING, RequestState.PREEMPTED),
    Filter.FINISHED: (RequestState.FINISHED,),
    Filter.MISSED: (RequestState.FINISHED,),
}


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Copies, so that a paused table stands still. Each array has shape (num_requests,)."""

    request_ids: list[str]
    adapters: list[str]
    """LoRA adapters by name; empty: none."""
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
    """As in `latencies`; NaN before there are two tokens, and where the first came unseen. So is the next."""
    ttft_s: FloatArray
    queue_s: FloatArray
    """Or how long it has waited until now; NaN when that was not seen."""
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
    goes_on = np.isin(requests.state[part], (RequestState.RUNNING, RequestState.FINISHED))
    newest = np.where(goes_on, end, -1)  # where nobody saw the last token: who runs has one in each step
    started = times.started_ns(number)
    still_waits = (started < 0) & (requests.state[part] == RequestState.WAITING)
    counted = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_output_tokens")
    others = ("state", "max_tokens", "num_preemptions", "num_draft_tokens", "num_accepted_tokens")
    return RequestColumns(
        request_ids=requests.request_ids[part],
        adapters=requests.adapters[part],
        number=number,
        tokens_per_s=tokens_per_s(
            requests.num_output_tokens[part], first, np.where(last >= 0, last, newest), mirror.stops
        ),
        ttft_s=running_s(arrival, first, mirror.stops),
        queue_s=running_s(arrival, np.where(still_waits, end, started), mirror.stops),
        time_s=running_s(arrival, end, mirror.stops),
        ending=times.endings(number),
        num_blocks=requests.num_held[part].astype(np.int64),
        **{name: getattr(requests, name)[part].astype(np.int64) for name in counted + others},
    )


def took_s(columns: RequestColumns) -> dict[str, FloatArray]:
    """What goals judge, as in `goals.took_s`, of each request."""
    has_next = (columns.num_output_tokens > 1) & (columns.tokens_per_s != 0)
    tpot_s = np.where(columns.num_output_tokens > 1, np.nan, 0.0)
    tpot_s[has_next] = 1 / columns.tokens_per_s[has_next]
    return {"ttft": columns.ttft_s, "tpot": tpot_s, "e2el": columns.time_s}


def judged(columns: RequestColumns, goals: Goals) -> Judged:
    """Of those that finished; who goes on, was aborted or refused neither kept goals nor missed them."""
    ended_somehow = (columns.state == RequestState.FINISHED) & (columns.ending == Ending.UNKNOWN)
    has_finished = ended_somehow | (columns.ending == Ending.FINISHED)
    found = judge(took_s(columns), goals)
    return Judged(found.kept & has_finished, found.missed & has_finished)


def order_rows(
    columns: RequestColumns, wanted: Filter, text: str, sort_by: str, descending: bool, goals: Goals | None = None
) -> npt.NDArray[np.intp]:
    """Rows of the requests that match, sorted; equal ones newest first."""
    matching = np.isin(columns.state, _STATES[wanted])
    if wanted is Filter.MISSED:
        matching &= judged(columns, goals or {}).missed
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


def _matches_text(columns: RequestColumns, text: str) -> npt.NDArray[np.bool_]:
    """Part of the id or of the adapter's name, or the number with or without #."""
    wanted = text.strip().lower()
    number = wanted.removeprefix("#")
    names = zip(columns.request_ids, columns.adapters, strict=True)
    by_id = np.fromiter(
        (wanted in name.lower() or wanted in whose.lower() for name, whose in names), bool, len(columns)
    )
    return by_id | (columns.number == int(number)) if number.isdecimal() else by_id

"""All requests of a session as numpy columns: arrival, latencies, end, and the reason for each delay.

Must be fed with telemetry in order, live or from a recording. Includes finished requests and those of earlier engine
starts. Latencies are computed by `latencies`, so they equal those of the exports. Thread-safe. Must not depend on Qt or
files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.latencies import Moments, running_s, tokens_per_s
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Event,
    Frame,
    RequestInfo,
    RequestRows,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.mirror.coalesce import merge_request_rows
from kvscope_telemetry.request_delays import KINDS, RequestDelays
from kvscope_telemetry.running_time import RunningTime

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
IntArray = npt.NDArray[np.int64]
MAX_REQUESTS: Final = 250_000
"""Maximum number of requests in the log. Above it, the oldest engine starts and then the oldest requests are
dropped.
"""
_UNSEEN: Final = -2
"""Value of a time if the event happened before telemetry was received. It marks that a later event of the same
kind is not the first one.
"""
_UNKNOWN: Final = -1
_COLUMNS: Final = (
    *("number", "arrival_ns", "num_prompt_tokens", "max_tokens", "client"),
    *("state", "num_computed_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions"),
    *("num_draft_tokens", "num_accepted_tokens", "waits_for"),
    *("started_ns", "first_token_ns", "last_token_ns", "ended_ns", "ending", "preempted_ns", "preempted_since_ns"),
)
"""Names of the columns for one engine start. Times are on the engine's clock; `_UNKNOWN` or `_UNSEEN` if not known."""
_MOMENTS: Final = ("started_ns", "first_token_ns", "last_token_ns", "ended_ns", "preempted_since_ns")
_KEY_SHIFT: Final = 40
_FRAMES_AT_ONCE: Final = 128
"""Number of frames per update of the log. A larger number would hold the lock for longer than a display frame."""
_Read = TypeVar("_Read")


class Ending(IntEnum):
    UNKNOWN = 0
    """The request has not ended, or its end was not reported."""
    FINISHED = 1
    ABORTED = 2
    REFUSED = 3


ENDINGS: Final = {"finished": Ending.FINISHED, "aborted": Ending.ABORTED, "refused": Ending.REFUSED}


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Copied columns of the request log, oldest request first, each of shape (n,). Durations of unfinished
    requests are measured up to the newest telemetry.
    """

    request_ids: list[str]
    adapters: list[str]
    key: IntArray
    """Identifier of a request, unique across engine starts; ascending."""
    epoch: IntArray
    number: IntArray
    client: IntArray
    """Number of the client that sent the request, or 0 if it is unknown."""
    arrival_ns: IntArray
    """Arrival on the timeline's wall clock, in nanoseconds."""
    end_ns: IntArray
    """End on the timeline's wall clock, in nanoseconds. For an unfinished request, this is the time of the
    newest telemetry. For a request whose end was not observed, it is the arrival.
    """
    state: IntArray
    has_ended: npt.NDArray[np.bool_]
    ending: IntArray
    num_prompt_tokens: IntArray
    num_computed_tokens: IntArray
    num_cached_tokens: IntArray
    num_output_tokens: IntArray
    num_output_now: IntArray
    """Number of output tokens at the time that the desktop displays."""
    max_tokens: IntArray
    num_blocks: IntArray
    num_preemptions: IntArray
    num_draft_tokens: IntArray
    num_accepted_tokens: IntArray
    tokens_per_s: FloatArray
    """Output tokens per second after the first token; NaN with fewer than two tokens, or if the first was not
    observed.
    """
    ttft_s: FloatArray
    queue_s: FloatArray
    """Time from the arrival to the first run, or until now; NaN if the first run was not observed."""
    time_s: FloatArray
    preempted_s: FloatArray
    cached_share: FloatArray
    """Share of the prompt found in the prefix cache, 0 to 1; NaN for a request that has not started."""

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time per output token after the first; NaN where `tokens_per_s` is."""
        known = self.tokens_per_s > 0
        return np.where(known, 1 / np.where(known, self.tokens_per_s, 1.0), np.nan)

    @property
    def delay_s(self) -> FloatArray:
        return np.nan_to_num(self.queue_s) + np.nan_to_num(self.preempted_s)


@dataclass(frozen=True, slots=True)
class RequestWallTimes:
    """Arrival, start, first token and end of a request on the timeline's wall clock; None if unknown."""

    arrival_ns: int
    started_ns: int | None
    first_token_ns: int | None
    ended_ns: int | None


class RequestLog:
    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.version = 0
        self._max_requests = max_requests
        self._starts: list[_EngineStart] = []
        self._num_starts = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(start) for start in self._starts)

    @property
    def epoch(self) -> int | None:
        """Epoch of the newest engine start; None before the first snapshot."""
        with self._lock:
            return self._starts[-1].epoch if self._starts else None

    def restate(self, snapshot: Snapshot, offset_ns: int) -> None:
        """Apply a snapshot. It begins a new engine start or, after a gap, replaces the known state of the current one.

        `offset_ns` is added to a time on the snapshot's clock to get the timeline's wall-clock time.
        """
        with self._lock:
            if not self._starts or self._starts[-1].epoch != snapshot.hello.epoch:
                hello = snapshot.hello
                self._starts.append(_EngineStart(hello.epoch, self._num_starts, hello.cache.max_num_seqs))
                self._num_starts += 1
            self._starts[-1].offset_ns = offset_ns
            self._starts[-1].restate(snapshot)
            self._update_version()

    def add(
        self,
        infos: Iterable[RequestInfo],
        rows: Sequence[tuple[RequestRows, IntArray]],
        events: Iterable[Event],
        time_ns: int,
        offset_ns: int,
    ) -> None:
        """Add what happened in the newest engine start until `time_ns`. Engine times are on the engine's monotonic
        clock.

        Args:
            infos: New requests.
            rows: Changes of requests, oldest first: each message, and the engine time in ns of each of its rows.
            events: Events since the last call.
            time_ns: Engine time of the newest telemetry.
            offset_ns: Nanoseconds to add to an engine time to get the timeline's wall-clock time.
        """
        with self._lock:
            if not self._starts:
                return
            newest = self._starts[-1]
            newest.offset_ns = offset_ns
            newest.time_ns = max(newest.time_ns, time_ns)
            newest.announce(infos)
            for each, times_ns in rows:
                newest.change(each, times_ns)
            newest.add_events(events)
            self._update_version()

    def columns(self) -> RequestColumns:
        with self._lock:
            return _concatenated([start.columns() for start in self._starts])

    def columns_of(self, epoch: int, number: int) -> RequestColumns | None:
        key = self.key_of(epoch, number)
        return None if key is None else self._lookup(key, _EngineStart.row_columns, None)

    def key_of(self, epoch: int, number: int) -> int | None:
        with self._lock:
            start = next((each for each in reversed(self._starts) if each.epoch == epoch), None)
            is_known = start is not None and start.row_of(number) is not None
            return (start.ordinal << _KEY_SHIFT) + number if start is not None and is_known else None

    def first_token_ns(self, epoch: int, number: int) -> int:
        """Return the time of a request's first token on its engine's clock; -1 if unknown."""
        with self._lock:
            start = next((each for each in reversed(self._starts) if each.epoch == epoch), None)
            row = None if start is None else start.row_of(number)
            return -1 if start is None or row is None else start.first_token_ns(row)

    def chain(self, key: int) -> tuple[str, ...]:
        """Return what delayed a request, oldest delay first (`RequestDelays.chain`); empty for an unknown request."""
        nothing: tuple[str, ...] = ()
        return self._lookup(key, lambda start, row: start.chain(row), nothing)

    def reason(self, key: int) -> str:
        """Return why a request took long, in one line (`RequestDelays.reason`); "" if nothing delayed it."""
        return self._lookup(key, lambda start, row: start.reason(row), "")

    def times(self, key: int) -> RequestWallTimes | None:
        nothing: RequestWallTimes | None = None
        return self._lookup(key, lambda start, row: start.times(row), nothing)

    def _lookup(self, key: int, read: Callable[[_EngineStart, int], _Read], default: _Read) -> _Read:
        with self._lock:
            for start in self._starts:
                row = start.row_of(key & ((1 << _KEY_SHIFT) - 1)) if start.ordinal == key >> _KEY_SHIFT else None
                if row is not None:
                    return read(start, row)
        return default

    def _update_version(self) -> None:
        self.version += 1
        surplus = sum(len(start) for start in self._starts) - self._max_requests
        if surplus > 0:
            surplus += self._max_requests // 8  # drop more than needed, so that it happens rarely
            while len(self._starts) > 1 and surplus >= len(self._starts[0]):
                surplus -= len(self._starts.pop(0))
            self._starts[0].drop_oldest(surplus)


class _EngineStart:
    """Requests of one engine start, sorted by number. Times are on the engine's clock."""

    def __init__(self, epoch: int, ordinal: int, batch_limit: int) -> None:
        self.epoch = epoch
        self.ordinal = ordinal
        self.offset_ns = 0
        self.time_ns = 0
        self.delays = RequestDelays(batch_limit=batch_limit)
        self.running = RunningTime()
        self.request_ids: list[str] = []
        self.adapters: list[str] = []
        self._data = np.zeros((len(_COLUMNS), 64), np.int64)
        self._update_views()

    def __len__(self) -> int:
        return len(self.request_ids)

    def row_of(self, number: int) -> int | None:
        row = int(np.searchsorted(self._column["number"], number))
        return row if row < len(self) and self._column["number"][row] == number else None

    def announce(self, infos: Iterable[RequestInfo]) -> None:
        added_infos = {info.number: info for info in infos}
        added_infos = {number: info for number, info in added_infos.items() if self.row_of(number) is None}
        if not added_infos:
            return
        begin, is_in_order = len(self), not len(self) or min(added_infos) > self._column["number"][-1]
        sorted_infos = [added_infos[number] for number in sorted(added_infos)]
        self.request_ids += [info.request_id for info in sorted_infos]
        self.adapters += [info.adapter for info in sorted_infos]
        if len(self) > self._data.shape[1]:
            num_more_columns = max(len(self) - self._data.shape[1], self._data.shape[1])
            self._data = np.concatenate((self._data, np.zeros((len(_COLUMNS), num_more_columns), np.int64)), axis=1)
        self._data[:, begin : len(self)] = 0
        self._update_views()
        for name in ("number", "arrival_ns", "num_prompt_tokens", "max_tokens", "client"):
            self._column[name][begin:] = [getattr(info, name) for info in sorted_infos]
        for name in _MOMENTS:
            self._column[name][begin:] = _UNKNOWN
        if not is_in_order:
            self._select_rows(np.argsort(self._column["number"], kind="stable"))

    def restate(self, snapshot: Snapshot) -> None:
        """Apply the state of a snapshot. Times of events before the snapshot that were not observed stay unknown."""
        self.time_ns = max(self.time_ns, snapshot.time_ns)
        self.running.catch_up(snapshot.stops, snapshot.time_ns)
        listed = [info.number for info in snapshot.requests_info]
        column = self._column
        missing = (column["state"] != RequestState.FINISHED) & ~np.isin(column["number"], listed)
        column["state"][missing] = RequestState.FINISHED
        column["ended_ns"][missing] = _UNSEEN
        self.announce(snapshot.requests_info)
        at, matches = self._rows_in(snapshot.requests)
        self._write(snapshot.requests, at, matches)
        column = self._column
        has_passed_by_name = {
            "started_ns": column["state"][at] != RequestState.WAITING,
            "first_token_ns": column["num_output_tokens"][at] > 0,
        }
        for name, has_passed in has_passed_by_name.items():
            unseen = at[has_passed & (column[name][at] == _UNKNOWN)]
            column[name][unseen] = _UNSEEN

    def change(self, rows: RequestRows, times_ns: IntArray) -> None:
        """Apply changes of requests, oldest first, with the time of each. A request may occur several times."""
        column = self._column
        at, matches = self._rows_in(rows)
        if not at.size:
            return
        tokens_before = column["num_output_tokens"][at]
        self._write(rows, at, matches)
        times = times_ns[matches]
        states = np.frombuffer(rows.state, "u1")[matches]
        tokens = np.frombuffer(rows.num_output_tokens, "<u4")[matches]
        for name, has_happened in (
            ("started_ns", states == RequestState.RUNNING),
            ("first_token_ns", tokens > 0),
            ("ended_ns", states == RequestState.FINISHED),
        ):
            is_first = has_happened & (column[name][at] == _UNKNOWN)
            # In reverse, so that the earliest time of each request is written last.
            column[name][at[is_first][::-1]] = times[is_first][::-1]
        # A request's newest token came with the first row that has as many tokens as its last one.
        is_newest = (tokens == column["num_output_tokens"][at]) & (tokens > tokens_before)
        column["last_token_ns"][at[is_newest][::-1]] = times[is_newest][::-1]

    def add_events(self, events: Iterable[Event]) -> None:
        column = self._column
        for event in events:
            self.running.record(event)
            if event.kind not in KINDS:
                continue
            self.delays.add(event)
            row = self.row_of(event.number)
            if row is None:
                continue
            if event.kind == "admitted":
                column["started_ns"][row] = event.time_ns
            elif event.kind == "preempted":
                column["preempted_since_ns"][row] = event.time_ns
            elif column["preempted_since_ns"][row] != _UNKNOWN:
                preempted_ns = self.running.running_ns(int(column["preempted_since_ns"][row]), event.time_ns)
                column["preempted_ns"][row] += preempted_ns
                column["preempted_since_ns"][row] = _UNKNOWN
            if event.kind in ENDINGS:
                column["state"][row] = RequestState.FINISHED
                column["ended_ns"][row], column["ending"][row] = event.time_ns, ENDINGS[event.kind]

    def columns(self, part: slice = slice(None)) -> RequestColumns:
        """Return copies of the columns, limited to the requests in the slice `part`, and the values derived
        from them.
        """
        column, running = {name: values[part] for name, values in self._column.items()}, self.running
        arrival, first, ended = column["arrival_ns"], column["first_token_ns"], column["ended_ns"]
        has_ended = column["state"] == RequestState.FINISHED
        now = np.maximum(self.time_ns, arrival)
        end = np.where(has_ended, ended, now)
        waits = (column["state"] == RequestState.WAITING) & (column["started_ns"] < 0)
        since = column["preempted_since_ns"]
        preempted_s = column["preempted_ns"] / 1e9 + np.where(
            since >= 0, np.nan_to_num(running_s(since, now, running)), 0.0
        )
        copied = (*_COUNTS, "number", "state", "ending", "num_prompt_tokens", "max_tokens", "client")
        return RequestColumns(
            request_ids=self.request_ids[part],
            adapters=self.adapters[part],
            key=(self.ordinal << _KEY_SHIFT) + column["number"],
            epoch=np.full(arrival.size, self.epoch),
            arrival_ns=arrival + self.offset_ns,
            end_ns=np.maximum(end, arrival) + self.offset_ns,
            has_ended=has_ended,
            num_blocks=np.zeros(arrival.size, np.int64),
            num_output_now=column["num_output_tokens"].copy(),
            tokens_per_s=tokens_per_s(
                column["num_output_tokens"], first, np.where(has_ended, ended, column["last_token_ns"]), running
            ),
            ttft_s=running_s(arrival, first, running),
            queue_s=running_s(arrival, np.where(waits, now, column["started_ns"]), running),
            time_s=running_s(arrival, end, running),
            preempted_s=preempted_s,
            cached_share=cached_share(*(column[name] for name in SHARE_OF)),
            **{name: column[name].copy() for name in copied},
        )

    def row_columns(self, row: int) -> RequestColumns | None:
        return self.columns(slice(row, row + 1))

    def chain(self, row: int) -> tuple[str, ...]:
        column = self._column
        moments, output = self._moments(row), int(column["num_output_tokens"][row])
        return self.delays.chain(int(column["number"][row]), moments, output, int(column["waits_for"][row]))

    def reason(self, row: int) -> str:
        column = self._column
        number, output, waits_for = (int(column[name][row]) for name in ("number", "num_output_tokens", "waits_for"))
        return self.delays.reason(number, self._moments(row), output, waits_for, self.time_ns)

    def times(self, row: int) -> RequestWallTimes:
        moments, offset_ns = self._moments(row), self.offset_ns

        def wall_ns(time_ns: int | None) -> int | None:
            return None if time_ns is None else time_ns + offset_ns

        return RequestWallTimes(
            moments.arrival_ns + offset_ns,
            wall_ns(moments.started_ns),
            wall_ns(moments.first_token_ns),
            wall_ns(moments.ended_ns),
        )

    def first_token_ns(self, row: int) -> int:
        return max(int(self._column["first_token_ns"][row]), _UNKNOWN)

    def drop_oldest(self, count: int) -> None:
        self._select_rows(np.arange(min(count, len(self)), len(self)))

    def _moments(self, row: int) -> Moments:
        def known(name: str) -> int | None:
            time_ns = int(self._column[name][row])
            return None if time_ns < 0 else time_ns

        return Moments(
            int(self._column["arrival_ns"][row]),
            known("started_ns"),
            known("first_token_ns"),
            known("ended_ns"),
            self.running,
        )

    def _rows_in(self, rows: RequestRows) -> tuple[Indices, Indices]:
        """Return where the changed requests in `rows` are in this log's columns, and the indices of these
        requests in `rows`. Requests that are not in the log are left out.
        """
        numbers = np.frombuffer(rows.number, "<u4").astype(np.int64)
        if not len(self) or numbers.size != len(rows.state):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        at = np.minimum(np.searchsorted(self._column["number"], numbers), len(self) - 1)
        matches = np.flatnonzero(self._column["number"][at] == numbers)
        return at[matches], matches

    def _write(self, rows: RequestRows, at: Indices, matches: Indices) -> None:
        """Copy the counts and states at the indices `matches` of `rows` to the indices `at` of the columns. If
        a request occurs several times, its last values win.
        """
        if not at.size:
            return
        states = np.frombuffer(rows.state, "u1")[matches]
        self._column["state"][at] = states
        for name, dtype in _COUNTS.items():
            if packed := getattr(rows, name):
                self._column[name][at] = np.frombuffer(packed, dtype)[matches]
        if rows.waits_for:
            waits_for = np.frombuffer(rows.waits_for, "<u4")[matches]
            waits = (waits_for > 0) & (states == RequestState.WAITING)
            self._column["waits_for"][at[waits]] = waits_for[waits]

    def _select_rows(self, order: Indices) -> None:
        self._data[:, : len(order)] = self._data[:, order]
        rows = order.tolist()
        self.request_ids = [self.request_ids[row] for row in rows]
        self.adapters = [self.adapters[row] for row in rows]
        self._update_views()

    def _update_views(self) -> None:
        self._column = {name: self._data[ordinal, : len(self)] for ordinal, name in enumerate(_COLUMNS)}


class RequestLogReader:
    """Feeds a `RequestLog` with the messages of a recording, many frames at a time."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._frames: list[Frame] = []
        self._offset_ns = 0

    def add_message(self, message: TelemetryMessage, log_time_ns: int) -> bool:
        """Add the next message, recorded at `log_time_ns`. Returns whether the log was updated."""
        if isinstance(message, Frame):
            if message.epoch != self._log.epoch:  # the state before it is unknown
                return False
            self._frames.append(message)
            self._offset_ns = log_time_ns - message.time_ns
            is_full = len(self._frames) >= _FRAMES_AT_ONCE
            if is_full:
                self.flush()
            return is_full
        if isinstance(message, Snapshot):
            self.flush()
            self._log.restate(message, log_time_ns - message.time_ns)
            return True
        return False

    def flush(self) -> None:
        frames, self._frames = self._frames, []
        if not frames:
            return
        with_rows = [frame for frame in frames if frame.requests.number]
        rows = []
        if with_rows:
            counts = [len(frame.requests.number) // 4 for frame in with_rows]
            times = np.repeat(np.array([frame.time_ns for frame in with_rows], np.int64), counts)
            rows = [(merge_request_rows([frame.requests for frame in with_rows]), times)]
        infos = [info for frame in frames for info in frame.new_requests]
        events = [event for frame in frames for event in frame.events]
        self._log.add(infos, rows, events, frames[-1].time_ns, self._offset_ns)


SHARE_OF: Final = ("num_prompt_tokens", "num_cached_tokens", "num_computed_tokens", "num_output_tokens")


def cached_share(prompt: IntArray, cached: IntArray, computed: IntArray, output: IntArray) -> FloatArray:
    """Return the share of each prompt found in the prefix cache; NaN for a request that has not started."""
    has_started = (cached > 0) | (computed > 0) | (output > 0)
    share: FloatArray = np.where(has_started, cached / np.maximum(prompt, 1), np.nan)
    return share


_COUNTS: Final = {
    "num_computed_tokens": "<u4",
    "num_cached_tokens": "<u4",
    "num_output_tokens": "<u4",
    "num_preemptions": "<u2",
    "num_draft_tokens": "<u4",
    "num_accepted_tokens": "<u4",
}


def _concatenated(parts: Sequence[RequestColumns]) -> RequestColumns:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _EngineStart(0, 0, 0).columns()
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in RequestColumns.__slots__
        if name not in ("request_ids", "adapters")
    }
    return RequestColumns(
        request_ids=[each for part in parts for each in part.request_ids],
        adapters=[each for part in parts for each in part.adapters],
        **columns,
    )

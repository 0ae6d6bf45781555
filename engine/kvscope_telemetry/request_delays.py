"""Explains what delayed a request: why it waited, for which request it was preempted, and what was recomputed.

Decides in which order the delays are listed and how they are worded, from the events of one engine start and a
request's `Moments`. The text refers to a request by its number, such as `#7`. The explanation lists what was observed
at that time: the requests that ran while another waited are not necessarily the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.slo import time_text

IntArray = npt.NDArray[np.int64]
_STARTS: Final = ("admitted", "resumed")
_STOPS: Final = ("preempted", "finished", "aborted", "refused")
KINDS: Final = (*_STARTS, *_STOPS)
_RAN_UNTIL: Final = ("preempted", "finished")
"""Kinds of events which imply that the request was running until then, even if its start was not observed."""
_UNBOUNDED: Final = 1 << 62
_MAX_NAMED: Final = 3
_NOTABLE_NS: Final = 10_000_000
"""Minimum duration in nanoseconds of a delay that is explained. A shorter delay is a wait for the end of the
current step, not for another request.
"""
_WAITED_FOR: Final[dict[int, str]] = {
    WaitsFor.GRAMMAR: "the grammar of its answer",
    WaitsFor.REMOTE_KV: "its KV to be loaded",
    WaitsFor.ADAPTER: "a slot for its LoRA adapter",
    WaitsFor.INPUT: "more of its prompt",
    WaitsFor.PROMPT: "its prompt to be computed for another completion",
}
"""Text for each reported reason for waiting that is independent of other requests."""


class RequestDelays:
    """Explains the delays of the requests of one engine start.

    `batch_limit`: maximum number of running requests, or 0 if it is unknown.
    """

    def __init__(self, events: Iterable[Event] = (), batch_limit: int = 0) -> None:
        self._batch_limit = batch_limit
        self._own_events: dict[int, list[Event]] = defaultdict(list)
        self._ended_runs = _Rows(3)
        """Request number, start and end of each completed run."""
        self._run_starts: dict[int, int | None] = {}
        """Maps a request number to the start of its current run, or to None if the request does not run.
        Requests that were never seen to start or stop are missing.
        """
        self._block_preemptions = _Rows(2)
        """Request number and time of each preemption that was needed to free blocks."""
        self._runs: IntArray | None = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add the next event of this engine start. Kinds other than `KINDS` are ignored."""
        if event.kind not in KINDS:
            return
        number, run_starts = event.number, self._run_starts
        if event.kind != "finished":
            self._own_events[number].append(event)
        if event.kind in _STARTS:
            run_starts[number] = event.time_ns
        else:
            begin = run_starts.get(number, -_UNBOUNDED if event.kind in _RAN_UNTIL else None)
            run_starts[number] = None
            if begin is not None:
                self._ended_runs.append(number, begin, event.time_ns)
        if event.kind == "preempted" and event.data is not None and event.data.kind == "preempted":
            self._block_preemptions.append(number, event.time_ns)
        self._runs = None

    def chain(
        self, number: int, moments: Moments, num_output_tokens: int, waits_for: int = WaitsFor.UNKNOWN
    ) -> tuple[str, ...]:
        """Return a text for each delay of a request from its arrival to its end, oldest first. Times exclude the
        engine's stops.

        `waits_for`: the last reason for waiting that the engine reported.
        """
        return tuple(self._delay_texts(number, moments, num_output_tokens, waits_for))

    def reason(self, number: int, moments: Moments, num_output_tokens: int, waits_for: int, now_ns: int) -> str:
        """Return the request's delays in one line, the longest first, then how long it decoded.

        The times add up to the request's total: those of prefill and decode exclude the time spent preempted. `now_ns`
        is the end of an ongoing delay. Delays of less than 10 ms are left out.
        """
        parts: list[tuple[int, str]] = []
        arrival_ns, running = moments.arrival_ns, moments.running
        until_ns = now_ns if moments.ended_ns is None else moments.ended_ns
        if moments.started_ns is not None:
            waited_until_ns: int | None = moments.started_ns
        else:  # with output, it ran before it was observed, and it is unknown how long it waited
            is_waiting = moments.first_token_ns is None and not num_output_tokens
            waited_until_ns = until_ns if is_waiting else None
        if waited_until_ns is not None:
            waited_ns = running.running_ns(arrival_ns, waited_until_ns)
            parts.append((waited_ns, self._wait_text(number, moments, waited_until_ns, waits_for)))
        spans, others = self._preempted_spans(number, until_ns)
        if others:
            preempted_ns = _running_ns(spans, moments, arrival_ns, until_ns)
            times = f" {len(others)} times" if len(others) > 1 else ""
            beneficiaries = ", ".join(f"#{other}" for other in dict.fromkeys(others) if other not in (0, number))
            suffix = f" for {beneficiaries}" if beneficiaries else ""
            preempted = f"preempted{times}{suffix}, {time_text(preempted_ns / 1e9)} in total"
            parts.append((preempted_ns, preempted))
        if moments.prefill_ns is not None and moments.first_token_ns is not None:
            prefill_ns = moments.prefill_ns - _running_ns(spans, moments, arrival_ns, moments.first_token_ns)
            parts.append((prefill_ns, f"prefill took {time_text(prefill_ns / 1e9)}"))
        texts = [text for lost_ns, text in sorted(parts, key=lambda part: -part[0]) if lost_ns >= _NOTABLE_NS]
        if moments.decode_ns is not None and moments.first_token_ns is not None and num_output_tokens > 1:
            decode_ns = moments.decode_ns - _running_ns(spans, moments, moments.first_token_ns, until_ns)
            texts.append(f"decoded {num_output_tokens:,} tokens in {time_text(decode_ns / 1e9)}")
        return "; ".join(texts)

    def _preempted_spans(self, number: int, until_ns: int) -> tuple[list[tuple[int, int]], list[int]]:
        spans, others, since_ns = [], [], None
        for event in self._own_events.get(number, []):
            if event.kind == "preempted":
                since_ns = event.time_ns
                others.append(event.other)
            elif event.kind == "resumed" and since_ns is not None:
                spans.append((since_ns, event.time_ns))
                since_ns = None
        if since_ns is not None:
            spans.append((since_ns, max(until_ns, since_ns)))
        return spans, others

    def _delay_texts(self, number: int, moments: Moments, num_output_tokens: int, waits_for: int) -> Iterator[str]:
        own_events = self._own_events.get(number, [])
        if moments.started_ns is not None:
            yield self._wait_text(number, moments, moments.started_ns, waits_for)
        elif moments.ended_ns is not None and moments.first_token_ns is None and not num_output_tokens:
            yield self._wait_text(number, moments, moments.ended_ns, waits_for)
        events = [event for event in own_events if moments.ended_ns is None or event.time_ns <= moments.ended_ns]
        num_lost = 0  # tokens freed by its last preemption
        is_prefill_explained = moments.first_token_ns is None
        for index, event in enumerate(events):
            if (
                not is_prefill_explained
                and moments.first_token_ns is not None
                and event.time_ns > moments.first_token_ns
            ):
                yield _prefill_text(events, moments)
                is_prefill_explained = True
            if event.kind == "preempted":
                later = (other.time_ns for other in events[index + 1 :] if other.kind in KINDS)
                yield _preemption_text(event, moments, next(later, moments.ended_ns))
                num_lost = event.num_tokens
            elif event.kind == "resumed":
                if (num_recomputed := num_lost - event.num_tokens) > 0:
                    yield f"recomputed {num_recomputed:,} token{'s' * (num_recomputed != 1)}"
                num_lost = 0
            elif event.kind in ("aborted", "refused"):
                yield f"{event.kind}: {cause_text(event)}" if cause_text(event) else event.kind
        if not is_prefill_explained:
            yield _prefill_text(events, moments)
        if moments.decode_ns is not None and moments.first_token_ns is not None and num_output_tokens > 1:
            yield self._decode_text(number, moments, num_output_tokens)

    def _wait_text(self, number: int, moments: Moments, until_ns: int, waits_for: int) -> str:
        from_ns, running = moments.arrival_ns, moments.running
        waited_s = running.running_ns(from_ns, until_ns) / 1e9
        text = f"waited {time_text(waited_s)}{_without_stops(moments, from_ns, until_ns)}"
        if until_ns - from_ns < _NOTABLE_NS:
            return text
        if waits_for in _WAITED_FOR:
            return f"{text} for {_WAITED_FOR[waits_for]}"
        runs = self._runs_in(number, from_ns, until_ns)
        if not len(runs):
            return text
        overlap = np.minimum(runs[:, 2], until_ns) - np.maximum(runs[:, 1], from_ns)
        longest = runs[np.argsort(-overlap, kind="stable"), 0]
        first = np.sort(np.unique(longest, return_index=True)[1])  # first occurrence of each request
        names = ", ".join(f"#{other}" for other in longest[first[:_MAX_NAMED]])
        names += f" and {first.size - _MAX_NAMED} more" if first.size > _MAX_NAMED else ""
        if (limit := self._full_batch(runs, from_ns, until_ns, waits_for)) is not None:
            return f"{text} for a place in the batch behind {names}{f' ({limit} running)' if limit else ''}"
        if (preempted := self._short_of_blocks(from_ns, until_ns, waits_for)) is not None:
            meanwhile = f" (#{preempted} was preempted meanwhile)" if preempted else ""
            return f"{text} for blocks held by {names}{meanwhile}"
        if waits_for == WaitsFor.BUDGET:
            return f"{text} for tokens of the step's budget, spent on {names}"
        return f"{text} behind {names}"

    def _full_batch(self, runs: IntArray, from_ns: int, until_ns: int, waits_for: int) -> int | None:
        """Return the limit on running requests if the request waited because this limit was reached, else None. A limit
        of 0 means that it is unknown.

        A reason reported by the engine takes precedence. Without one, the batch must have been full for most of the
        time.
        """
        limit = self._batch_limit
        if waits_for != WaitsFor.UNKNOWN:
            return limit if waits_for == WaitsFor.SEQUENCE_LIMIT else None
        times, counts = _num_running_over_time(runs, from_ns, until_ns)
        lengths = np.diff(np.append(times, until_ns))
        is_limit_known = limit > 0 and int(counts.max()) <= limit  # the limit may be changed while the engine runs
        is_full = is_limit_known and 2 * int(lengths[counts == limit].sum()) > until_ns - from_ns
        return limit if is_full else None

    def _short_of_blocks(self, from_ns: int, until_ns: int, waits_for: int) -> int | None:
        """Return the number of the first request that was preempted to free blocks in this time, if the request
        waited for blocks, else None. The number is 0 if no request was preempted.
        """
        rows = self._block_preemptions.rows
        short = rows[(rows[:, 1] >= from_ns) & (rows[:, 1] <= until_ns)]
        if len(short):
            return int(short[0, 0]) if waits_for in (WaitsFor.UNKNOWN, WaitsFor.BLOCKS) else None
        return 0 if waits_for == WaitsFor.BLOCKS else None

    def _decode_text(self, number: int, moments: Moments, num_output_tokens: int) -> str:
        assert moments.first_token_ns is not None, "it has a first token"
        assert moments.ended_ns is not None, "it has an end"
        assert moments.decode_ns is not None, "it has both"
        per_token = time_text(moments.decode_ns / 1e9 / (num_output_tokens - 1))
        runs = self._runs_in(number, moments.first_token_ns, moments.ended_ns)
        max_running = (
            int(_num_running_over_time(runs, moments.first_token_ns, moments.ended_ns)[1].max()) if len(runs) else 0
        )
        others = f", with up to {max_running} other{'s' * (max_running != 1)} running" if max_running else ""
        return f"wrote {num_output_tokens:,} tokens, {per_token} each on average{others}"

    def _runs_in(self, number: int, from_ns: int, until_ns: int) -> IntArray:
        """Return the runs of other requests that overlap this time range, as rows of (request number, start, end)."""
        if self._runs is None:
            ongoing = [(each, begin, _UNBOUNDED) for each, begin in self._run_starts.items() if begin is not None]
            self._runs = np.concatenate((self._ended_runs.rows, np.array(ongoing, np.int64).reshape(-1, 3)))
        runs = self._runs
        overlapping: IntArray = runs[(runs[:, 0] != number) & (runs[:, 1] < until_ns) & (runs[:, 2] > from_ns)]
        return overlapping


class _Rows:
    """Growing array of integers, shape (n, width)."""

    def __init__(self, width: int) -> None:
        self._data = np.empty((64, width), np.int64)
        self._size = 0

    @property
    def rows(self) -> IntArray:
        return self._data[: self._size]

    def append(self, *values: int) -> None:
        if self._size == len(self._data):
            self._data = np.concatenate((self._data, np.empty_like(self._data)))
        self._data[self._size] = values
        self._size += 1


def _running_ns(spans: Iterable[tuple[int, int]], moments: Moments, from_ns: int, until_ns: int) -> int:
    """Return the total length of `spans`, clipped to `from_ns` and `until_ns`, without the engine's stops."""
    clipped = ((max(start, from_ns), min(end, until_ns)) for start, end in spans)
    return sum(moments.running.running_ns(start, end) for start, end in clipped if start < end)


def _num_running_over_time(runs: IntArray, from_ns: int, until_ns: int) -> tuple[IntArray, IntArray]:
    """Return the times at which the number of running requests may change, ascending, and the number from each
    time on.
    """
    begins, ends = np.maximum(runs[:, 1], from_ns), np.minimum(runs[:, 2], until_ns)
    times, indices = np.unique(np.concatenate(([from_ns], begins, ends)), return_inverse=True)
    steps = np.concatenate(([0], np.ones(len(begins), np.int64), -np.ones(len(ends), np.int64)))
    changes = np.zeros(len(times), np.int64)
    np.add.at(changes, indices, steps)
    return times, np.cumsum(changes)


def _prefill_text(own_events: list[Event], moments: Moments) -> str:
    took = time_text((moments.prefill_ns or 0) / 1e9)
    if moments.prefill_ns is None:
        return "it produced its first token; its start was not observed"
    text = f"its first token came {took} after it began"
    for event in own_events:
        if event.kind == "admitted" and event.data is not None and event.data.kind == "started":
            known = event.data.num_known_tokens
            return f"{text}, {known - event.num_tokens:,} of {known:,} prompt tokens computed"
    return text


def _preemption_text(event: Event, moments: Moments, until_ns: int | None) -> str:
    whom = f" for #{event.other}" if event.other not in (0, event.number) else ""
    verb = "swapped out" if event.data is not None and event.data.is_swapped else "preempted"
    text = f"{verb}{whom}"
    if until_ns is not None:
        aside = time_text(moments.running.running_ns(event.time_ns, until_ns) / 1e9)
        text += f", {aside} aside{_without_stops(moments, event.time_ns, until_ns)}"
    return f"{text}: {cause}" if (cause := cause_text(event)) else text


def _without_stops(moments: Moments, from_ns: int, until_ns: int) -> str:
    stopped_ns = moments.running.stopped_ns(from_ns, until_ns)
    if not stopped_ns:
        return ""
    return f" (without {time_text(stopped_ns / 1e9)} {moments.running.stopped_text((from_ns, until_ns))})"

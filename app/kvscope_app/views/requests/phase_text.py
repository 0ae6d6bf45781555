"""Durations of a request's phases (queued, prefill, decode, preempted) up to the moment shown. Imports no Qt.

Times are those observed; earlier ones come from the admission event and from `find_first`. Unknown times are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvscope_app.session.request_times import RequestTimes
from kvscope_app.ui.number_text import count, percent, plural, seconds
from kvscope_app.views.requests.waiting_text import why_waits
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.mirror.mirror import Mirror

FindFirst = Callable[[], int]
"""Function that returns the time of the request's first token by the engine's clock in ns, or -1 if it is not (yet)
known."""


def phases(
    mirror: Mirror, times: RequestTimes, events: Sequence[Event], number: int, find_first: FindFirst = lambda: -1
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) pairs. `events`: the request's events, oldest first, by the engine's clock."""
    row = mirror.requests.row_of(number)
    if row is None:
        return
    requests = mirror.requests
    own = [event for event in events if event.number == number]
    if waits := why_waits(mirror, number):
        yield "Waiting", f"{waits}."
    arrival, ended = int(requests.arrival_ns[row]), int(requests.finished_ns[row])
    until = ended if ended >= 0 else max(mirror.time_ns, arrival)
    started = _started_ns(times, own, number)
    first, last = (int(look(np.array([number]))[0]) for look in (times.first_token_ns, times.last_token_ns))
    if first < 0 <= started and requests.num_output_tokens[row]:
        first = find_first()
        last = until if last < 0 else last
    if started >= 0:
        yield "Queued", seconds(mirror.stops.running_ns(arrival, started) / 1e9)
    elif requests.state[row] == RequestState.WAITING:
        yield "Queued", f"{seconds(mirror.stops.running_ns(arrival, until) / 1e9)} so far"
    yield from _computed(mirror, row, own, (started, first, until))
    if first >= 0:
        yield from _written(mirror, row, own, first, last)
    yield from _preempted(mirror, row, own)
    if stopped_ns := mirror.stops.stopped_ns(arrival, until):
        yield mirror.stops.stopped_text((arrival, until)).capitalize(), f"{seconds(stopped_ns / 1e9)}, excluded"


def _started_ns(times: RequestTimes, own: list[Event], number: int) -> int:
    """Return when the request was admitted in ns, or -1 if unknown. An observed start is the end of the first step."""
    admitted = next((event.time_ns for event in own if event.kind == "admitted"), -1)
    return admitted if admitted >= 0 else int(times.started_ns(np.array([number]))[0])


def _preempted_ns(mirror: Mirror, own: list[Event], from_ns: int, until_ns: int) -> int:
    """Return how long a request was preempted between two times, by its events, excluding the engine's stops."""
    spans = (
        (max(event.time_ns - event.data.waited_ns, from_ns), min(event.time_ns, until_ns))
        for event in own
        if event.kind == "resumed" and event.data is not None
    )
    return sum(mirror.stops.running_ns(start, end) for start, end in spans if start < end)


def _including(preempted_ns: int) -> str:
    return f" including {seconds(preempted_ns / 1e9)} preempted" if preempted_ns else ""


def _computed(mirror: Mirror, row: int, own: list[Event], times_ns: tuple[int, int, int]) -> Iterator[tuple[str, str]]:
    """Describe the prefill of a request. `times_ns`: its start, its first token and the moment shown."""
    requests, (started, first, until) = mirror.requests, times_ns
    prompt, cached = int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row])
    if started < 0:
        return
    what = f"{count(prompt - cached)} of {plural(prompt, 'prompt token')}, {count(cached)} cached"
    if first >= 0:
        took = seconds(mirror.stops.running_ns(started, first) / 1e9)
        including = _including(_preempted_ns(mirror, own, started, first))
        yield "Prefill", f"{took}{including}, until its first token: {what}"
    elif not requests.num_output_tokens[row] and requests.finished_ns[row] < 0:
        share, computed = prefill_so_far(mirror, row)
        so_far = seconds(mirror.stops.running_ns(started, until) / 1e9)
        yield "Prefill", f"{so_far} so far: {share}, {computed}"
    else:
        yield "Prefill", f"{what}; its first token was not observed"


def prefill_so_far(mirror: Mirror, row: int) -> tuple[str, str]:
    """Return `16 %` and `1 302 of 8 136 prompt tokens, 240 of them cached` for a request without an output token."""
    requests = mirror.requests
    prompt, cached = int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row])
    computed = min(int(requests.num_computed_tokens[row]), prompt)
    reused = f", {count(cached)} of them cached" if cached else ""
    share = percent(computed / prompt if prompt else None, 0)
    return share, f"{count(computed)} of {plural(prompt, 'prompt token')}{reused}"


def _written(mirror: Mirror, row: int, own: list[Event], first: int, last: int) -> Iterator[tuple[str, str]]:
    tokens = int(mirror.requests.num_output_tokens[row])
    if tokens > 1 and last > first:
        took = mirror.stops.running_ns(first, last) / 1e9
        including, between = _including(_preempted_ns(mirror, own, first, last)), seconds(took / (tokens - 1))
        yield "Decode", f"{seconds(took)}{including}, {plural(tokens, 'token')}, {between} between tokens"
    elif tokens:
        yield "Decode", plural(tokens, "token")


def _preempted(mirror: Mirror, row: int, own: list[Event]) -> Iterator[tuple[str, str]]:
    times = int(mirror.requests.num_preemptions[row])
    preemptions = [event for event in own if event.kind == "preempted"]
    if not times and not preemptions:
        return
    away_ns = _preempted_ns(mirror, own, 0, mirror.time_ns)
    away = f", resumed after {seconds(away_ns / 1e9)}" if away_ns else ""
    times = max(times, len(preemptions))
    yield "Preempted", f"{plural(times, 'time')}{away}"
    if preemptions and (cause := cause_text(preemptions[-1])):
        yield "Reason" if times == 1 else "The last time", f"{cause[0].upper()}{cause[1:]}."

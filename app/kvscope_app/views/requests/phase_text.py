"""How long a request waited, computed its prompt and wrote, and what it lost meanwhile, up to the moment shown. No Qt.

Times come from what was seen; of what was before that, the event of its admission and whoever finds its first token
tell. What nobody knows is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvscope_app.look.number_text import count, plural, seconds
from kvscope_app.session.request_times import RequestTimes
from kvscope_app.views.requests.waiting_text import why_waits
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.state.mirror import Mirror

FindFirst = Callable[[int], int]
"""When the first token came of a request that was admitted then, both by the engine's clock; -1: not known (yet)."""


def phases(
    mirror: Mirror, times: RequestTimes, events: Sequence[Event], number: int, find_first: FindFirst = lambda _: -1
) -> Iterator[tuple[str, str]]:
    """Names and values of what there is to tell. `events`: the request's, oldest first, engine's clock."""
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
        first = find_first(started)
        last = until if last < 0 else last
    if started >= 0:
        yield "Queued", seconds(mirror.stops.running_ns(arrival, started) / 1e9)
    elif requests.state[row] == RequestState.WAITING:
        yield "Queued", f"{seconds(mirror.stops.running_ns(arrival, until) / 1e9)} so far"
    yield from _computed(mirror, row, started, first, until)
    if first >= 0:
        yield from _written(mirror, row, first, last)
    yield from _preempted(mirror, row, own)
    if stopped_ns := mirror.stops.stopped_ns(arrival, until):
        yield "Paused", f"{seconds(stopped_ns / 1e9)}, excluded"


def _started_ns(times: RequestTimes, own: list[Event], number: int) -> int:
    """When it was admitted; what was seen is the end of its first step."""
    admitted = next((event.time_ns for event in own if event.kind == "admitted"), -1)
    return admitted if admitted >= 0 else int(times.started_ns(np.array([number]))[0])


def _computed(mirror: Mirror, row: int, started: int, first: int, until: int) -> Iterator[tuple[str, str]]:
    requests = mirror.requests
    prompt, cached = int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row])
    if started < 0:
        return
    what = f"{count(prompt - cached)} of {plural(prompt, 'prompt token')}, {count(cached)} cached"
    if first >= 0:
        yield "Prefill", f"{seconds(mirror.stops.running_ns(started, first) / 1e9)}, until its first token: {what}"
    elif not requests.num_output_tokens[row] and requests.finished_ns[row] < 0:
        yield "Prefill", f"{seconds(mirror.stops.running_ns(started, until) / 1e9)} so far: {what}"
    else:
        yield "Prefill", f"{what}; its first token was not seen"


def _written(mirror: Mirror, row: int, first: int, last: int) -> Iterator[tuple[str, str]]:
    tokens = int(mirror.requests.num_output_tokens[row])
    if tokens > 1 and last > first:
        took = mirror.stops.running_ns(first, last) / 1e9
        yield "Decode", f"{seconds(took)}, {plural(tokens, 'token')}, {seconds(took / (tokens - 1))} between tokens"
    elif tokens:
        yield "Decode", plural(tokens, "token")


def _preempted(mirror: Mirror, row: int, own: list[Event]) -> Iterator[tuple[str, str]]:
    times = int(mirror.requests.num_preemptions[row])
    preemptions = [event for event in own if event.kind == "preempted"]
    if not times and not preemptions:
        return
    away_ns = sum(event.data.waited_ns for event in own if event.kind == "resumed" and event.data is not None)
    away = f", resumed after {seconds(away_ns / 1e9)}" if away_ns else ""
    times = max(times, len(preemptions))
    yield "Preempted", f"{plural(times, 'time')}{away}"
    if preemptions and (cause := cause_text(preemptions[-1])):
        yield "Reason" if times == 1 else "The last time", f"{cause[0].upper()}{cause[1:]}."

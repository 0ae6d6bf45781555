"""Durations of a request's phases (queued, prefill, decode, preempted) up to the time shown, as text. Imports no Qt.

Times before kvscope connected are taken from the admission event and `find_first`. Unknown times are omitted.
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
"""Function that returns the engine time of the request's first token in ns, or -1 if it is not known (yet)."""


def phases(
    mirror: Mirror, times: RequestTimes, events: Sequence[Event], number: int, find_first: FindFirst = lambda: -1
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each phase of request `number`.

    `events` has events with engine times, oldest first; events of other requests are ignored. `find_first` is called
    for the time of the first token if it was not observed.
    """
    row = mirror.requests.row_of(number)
    if row is None:
        return
    requests = mirror.requests
    own_events = [event for event in events if event.number == number]
    if reason := why_waits(mirror, number):
        yield "Waiting", f"{reason}."
    # Times are on the engine's clock; stops of the engine do not count towards any phase.
    arrival_ns, ended_ns = int(requests.arrival_ns[row]), int(requests.finished_ns[row])
    until_ns = ended_ns if ended_ns >= 0 else max(mirror.time_ns, arrival_ns)
    started_ns = _started_ns(times, own_events, number)
    first_ns, last_ns = (
        int(times_of(np.array([number]))[0]) for times_of in (times.first_token_ns, times.last_token_ns)
    )
    if first_ns < 0 <= started_ns and requests.num_output_tokens[row]:  # its first token came before kvscope connected
        first_ns = find_first()
        last_ns = until_ns if last_ns < 0 else last_ns
    if started_ns >= 0:
        yield "Queued", seconds(mirror.stops.running_ns(arrival_ns, started_ns) / 1e9)
    elif requests.state[row] == RequestState.WAITING:
        yield "Queued", f"{seconds(mirror.stops.running_ns(arrival_ns, until_ns) / 1e9)} so far"
    yield from _prefill_facts(mirror, row, own_events, started_ns=started_ns, first_ns=first_ns, until_ns=until_ns)
    if first_ns >= 0:
        yield from _decode_facts(mirror, row, own_events, first_ns, last_ns)
    yield from _preemption_facts(mirror, row, own_events)
    if stopped_ns := mirror.stops.stopped_ns(arrival_ns, until_ns):
        yield mirror.stops.stopped_text((arrival_ns, until_ns)).capitalize(), f"{seconds(stopped_ns / 1e9)}, excluded"


def _started_ns(times: RequestTimes, own_events: list[Event], number: int) -> int:
    """Return the engine time of the request's admission in ns, -1 if unknown. If the admission event is missing, the
    end of the first observed step is used.
    """
    admitted = next((event.time_ns for event in own_events if event.kind == "admitted"), -1)
    return admitted if admitted >= 0 else int(times.started_ns(np.array([number]))[0])


def _preempted_ns(mirror: Mirror, own_events: list[Event], from_ns: int, until_ns: int) -> int:
    """Return the ns between `from_ns` and `until_ns` in which the request was preempted, without the time during which
    the engine was stopped.
    """
    spans = (
        (max(event.time_ns - event.data.waited_ns, from_ns), min(event.time_ns, until_ns))
        for event in own_events
        if event.kind == "resumed" and event.data is not None
    )
    return sum(mirror.stops.running_ns(start, end) for start, end in spans if start < end)


def _preempted_text(preempted_ns: int) -> str:
    return f" including {seconds(preempted_ns / 1e9)} preempted" if preempted_ns else ""


def _prefill_facts(
    mirror: Mirror, row: int, own_events: list[Event], *, started_ns: int, first_ns: int, until_ns: int
) -> Iterator[tuple[str, str]]:
    """Yield the prefill's duration and number of tokens. `started_ns` and `first_ns`, the times of the request's start
    and first token, are -1 if unknown.

    `until_ns` is the time shown, or the request's end if that is earlier.
    """
    requests = mirror.requests
    num_prompt_tokens, num_cached_tokens = int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row])
    if started_ns < 0:
        return
    prompt_text = f"{count(num_prompt_tokens - num_cached_tokens)} of {plural(num_prompt_tokens, 'prompt token')}"
    tokens_text = f"{prompt_text}, {count(num_cached_tokens)} cached"
    if first_ns >= 0:
        duration = seconds(mirror.stops.running_ns(started_ns, first_ns) / 1e9)
        preempted_text = _preempted_text(_preempted_ns(mirror, own_events, started_ns, first_ns))
        yield "Prefill", f"{duration}{preempted_text}, until its first token: {tokens_text}"
    elif not requests.num_output_tokens[row] and requests.finished_ns[row] < 0:
        share_text, computed_text = prefill_progress(mirror, row)
        elapsed = seconds(mirror.stops.running_ns(started_ns, until_ns) / 1e9)
        yield "Prefill", f"{elapsed} so far: {share_text}, {computed_text}"
    else:
        yield "Prefill", f"{tokens_text}; its first token was not observed"


def prefill_progress(mirror: Mirror, row: int) -> tuple[str, str]:
    """Return texts such as `16 %` and `1 302 of 8 136 prompt tokens, 240 of them cached`, before the first output
    token.
    """
    requests = mirror.requests
    num_prompt_tokens, num_cached_tokens = int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row])
    num_computed = min(int(requests.num_computed_tokens[row]), num_prompt_tokens)
    reused_text = f", {count(num_cached_tokens)} of them cached" if num_cached_tokens else ""
    share_text = percent(num_computed / num_prompt_tokens if num_prompt_tokens else None, 0)
    return share_text, f"{count(num_computed)} of {plural(num_prompt_tokens, 'prompt token')}{reused_text}"


def _decode_facts(
    mirror: Mirror, row: int, own_events: list[Event], first_ns: int, last_ns: int
) -> Iterator[tuple[str, str]]:
    num_tokens = int(mirror.requests.num_output_tokens[row])
    if num_tokens > 1 and last_ns > first_ns:
        duration_s = mirror.stops.running_ns(first_ns, last_ns) / 1e9
        preempted_text = _preempted_text(_preempted_ns(mirror, own_events, first_ns, last_ns))
        between = seconds(duration_s / (num_tokens - 1))
        yield (
            "Decode",
            f"{seconds(duration_s)}{preempted_text}, {plural(num_tokens, 'token')}, {between} between tokens",
        )
    elif num_tokens:
        yield "Decode", plural(num_tokens, "token")


def _preemption_facts(mirror: Mirror, row: int, own_events: list[Event]) -> Iterator[tuple[str, str]]:
    num_preemptions = int(mirror.requests.num_preemptions[row])
    preemptions = [event for event in own_events if event.kind == "preempted"]
    if not num_preemptions and not preemptions:
        return
    preempted_ns = _preempted_ns(mirror, own_events, 0, mirror.time_ns)
    resumed_text = f", resumed after {seconds(preempted_ns / 1e9)}" if preempted_ns else ""
    num_preemptions = max(num_preemptions, len(preemptions))
    yield "Preempted", f"{plural(num_preemptions, 'time')}{resumed_text}"
    if preemptions and (cause := cause_text(preemptions[-1])):
        yield "Reason" if num_preemptions == 1 else "The last time", f"{cause[0].upper()}{cause[1:]}."

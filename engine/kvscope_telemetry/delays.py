"""What delayed a request, step by step: behind whom it waited, for whom it was preempted, what it computed again.

Owns the chain and its words, made of the events of one engine start and a request's `Moments`. Requests are named as
`#7`. It tells what was there at the time, and no more: who ran while a request waited need not be why it did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.goals import time_text
from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.telemetry import Event

IntArray = npt.NDArray[np.int64]
_STARTS: Final = ("admitted", "resumed")
_STOPS: Final = ("preempted", "finished", "aborted", "refused")
KINDS: Final = (*_STARTS, *_STOPS)
"""Of the events that are looked at."""
_RAN_UNTIL: Final = ("preempted", "finished")
"""Who is told of this ran before, though nobody saw it begin."""
_EVER: Final = 1 << 62
_MAX_NAMED: Final = 3
_NOTABLE_NS: Final = 10_000_000
"""A shorter wait is one for the step in progress, behind nobody."""


class Delays:
    """Explains the delays of requests of one engine start. `batch_limit` is how many may run at once, 0
    when not known.
    """

    def __init__(self, events: Iterable[Event], batch_limit: int = 0) -> None:
        self._batch_limit = batch_limit
        self._own: dict[int, list[Event]] = defaultdict(list)
        ran: list[tuple[int, int, int]] = []
        short_of_blocks: list[tuple[int, int]] = []
        began: dict[int, int | None] = {}
        """Of who was seen to start or stop; None: it does not run now."""
        for event in events:
            self._own[event.number].append(event)
            if event.kind in _STARTS:
                began[event.number] = event.time_ns
            elif event.kind in _STOPS:
                begin = began.get(event.number, -_EVER if event.kind in _RAN_UNTIL else None)
                began[event.number] = None
                if begin is not None:
                    ran.append((event.number, begin, event.time_ns))
            if event.kind == "preempted" and event.data is not None and event.data.kind == "preempted":
                short_of_blocks.append((event.number, event.time_ns))
        ran += [(number, begin, _EVER) for number, begin in began.items() if begin is not None]
        self._ran = np.array(ran, np.int64).reshape(-1, 3)
        """Number, from when and until when it ran."""
        self._short = np.array(short_of_blocks, np.int64).reshape(-1, 2)
        """Who was preempted for blocks, and when."""

    def chain(self, number: int, moments: Moments, num_output_tokens: int) -> tuple[str, ...]:
        """Return the delays of a request from its arrival to its end, oldest first; times are on the engine's clock,
        without its stops.
        """
        return tuple(self._links(number, moments, num_output_tokens))

    def _links(self, number: int, moments: Moments, num_output_tokens: int) -> Iterator[str]:
        own = self._own.get(number, [])
        if moments.started_ns is not None:
            yield self._waited(number, moments, moments.started_ns)
        elif moments.ended_ns is not None and moments.first_token_ns is None:
            yield self._waited(number, moments, moments.ended_ns)
        events = [event for event in own if moments.ended_ns is None or event.time_ns <= moments.ended_ns]
        lost = 0  # tokens that its last preemption took
        is_first_told = moments.first_token_ns is None
        for place, event in enumerate(events):
            if not is_first_told and moments.first_token_ns is not None and event.time_ns > moments.first_token_ns:
                yield _prefill(events, moments)
                is_first_told = True
            if event.kind == "preempted":
                later = (other.time_ns for other in events[place + 1 :] if other.kind in KINDS)
                yield _aside(event, moments, next(later, moments.ended_ns))
                lost = event.num_tokens
            elif event.kind == "resumed":
                if (again := lost - event.num_tokens) > 0:
                    yield f"recomputed {again:,} token{'s' * (again != 1)}"
                lost = 0
            elif event.kind in ("aborted", "refused"):
                yield f"{event.kind}: {cause_text(event)}" if cause_text(event) else event.kind
        if not is_first_told:
            yield _prefill(events, moments)
        if moments.decode_ns is not None and moments.first_token_ns is not None and num_output_tokens > 1:
            yield self._decoded(number, moments, num_output_tokens)

    def _waited(self, number: int, moments: Moments, until_ns: int) -> str:
        from_ns, running = moments.arrival_ns, moments.running
        text = f"waited {time_text(running.running_ns(from_ns, until_ns) / 1e9)}{_without(moments, from_ns, until_ns)}"
        there = self._there(number, from_ns, until_ns)
        if until_ns - from_ns < _NOTABLE_NS or not len(there):
            return text
        overlap = np.minimum(there[:, 2], until_ns) - np.maximum(there[:, 1], from_ns)
        longest = {int(other): 0 for other in there[np.argsort(-overlap, kind="stable"), 0]}
        named = ", ".join(f"#{other}" for other in list(longest)[:_MAX_NAMED])
        more = f" and {len(longest) - _MAX_NAMED} more" if len(longest) > _MAX_NAMED else ""
        return f"{text} behind {named}{more}{self._what_was_full(there, from_ns, until_ns)}"

    def _what_was_full(self, there: IntArray, from_ns: int, until_ns: int) -> str:
        times, counts = _counted(there, from_ns, until_ns)
        lengths = np.diff(np.append(times, until_ns))
        limit = self._batch_limit
        is_limit_known = limit > 0 and int(counts.max()) <= limit  # it may be changed while the engine runs
        if is_limit_known and 2 * int(lengths[counts == limit].sum()) > until_ns - from_ns:
            return f" (batch full: {limit} running)"
        short = self._short[(self._short[:, 1] >= from_ns) & (self._short[:, 1] <= until_ns)]
        return f" (blocks full: #{int(short[0, 0])} was preempted meanwhile)" if len(short) else ""

    def _decoded(self, number: int, moments: Moments, num_output_tokens: int) -> str:
        assert moments.first_token_ns is not None, "it has a first token"
        assert moments.ended_ns is not None, "it has an end"
        assert moments.decode_ns is not None, "it has both"
        each = time_text(moments.decode_ns / 1e9 / (num_output_tokens - 1))
        there = self._there(number, moments.first_token_ns, moments.ended_ns)
        most = int(_counted(there, moments.first_token_ns, moments.ended_ns)[1].max()) if len(there) else 0
        beside = f", with up to {most} other{'s' * (most != 1)} running" if most else ""
        return f"wrote {num_output_tokens:,} tokens, {each} each on average{beside}"

    def _there(self, number: int, from_ns: int, until_ns: int) -> IntArray:
        """Rows of the others that ran in this time."""
        ran = self._ran
        found: IntArray = ran[(ran[:, 0] != number) & (ran[:, 1] < until_ns) & (ran[:, 2] > from_ns)]
        return found


def _counted(ran: IntArray, from_ns: int, until_ns: int) -> tuple[IntArray, IntArray]:
    """Times within, ascending, and how many run from each on."""
    begins, ends = np.maximum(ran[:, 1], from_ns), np.minimum(ran[:, 2], until_ns)
    times, places = np.unique(np.concatenate(([from_ns], begins, ends)), return_inverse=True)
    steps = np.concatenate(([0], np.ones(len(begins), np.int64), -np.ones(len(ends), np.int64)))
    changes = np.zeros(len(times), np.int64)
    np.add.at(changes, places, steps)
    return times, np.cumsum(changes)


def _prefill(own: list[Event], moments: Moments) -> str:
    took = time_text((moments.prefill_ns or 0) / 1e9)
    if moments.prefill_ns is None:
        return "its first token came; nobody saw when it began"
    text = f"its first token came {took} after it began"
    for event in own:
        if event.kind == "admitted" and event.data is not None and event.data.kind == "started":
            known = event.data.num_known_tokens
            return f"{text}, {known - event.num_tokens:,} of {known:,} prompt tokens computed"
    return text


def _aside(event: Event, moments: Moments, until_ns: int | None) -> str:
    whom = f" for #{event.other}" if event.other not in (0, event.number) else ""
    verb = "swapped out" if event.data is not None and event.data.is_swapped else "preempted"
    text = f"{verb}{whom}"
    if until_ns is not None:
        aside = time_text(moments.running.running_ns(event.time_ns, until_ns) / 1e9)
        text += f", {aside} aside{_without(moments, event.time_ns, until_ns)}"
    return f"{text}: {cause}" if (cause := cause_text(event)) else text


def _without(moments: Moments, from_ns: int, until_ns: int) -> str:
    stopped_ns = moments.running.stopped_ns(from_ns, until_ns)
    return f" (without {time_text(stopped_ns / 1e9)} paused)" if stopped_ns else ""

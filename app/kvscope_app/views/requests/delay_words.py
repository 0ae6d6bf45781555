"""What delayed a request that missed its goals, as the session's events tell it, with links to whom it names. No Qt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Final

import numpy as np

from kvscope_app.session.session import Session
from kvscope_telemetry.delays import KINDS, Delays
from kvscope_telemetry.latencies import Moments

_NAMED: Final = re.compile(r"#(\d{1,10})\b")
_MAX_EVENTS: Final = 20_000
"""The newest that are looked through; of what was before, nobody is named."""


def delays_of(session: Session, number: int) -> tuple[str, ...]:
    """The chain of `Delays` of one that the mirror knows."""
    mirror, history = session.mirror, session.history
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return ()
    told = history.events.of_kinds(KINDS, _MAX_EVENTS)
    events = (entry.event for entry in told if entry.epoch == mirror.epoch)
    numbers = np.array([number])
    last_ns = history.request_times.last_token_ns(numbers)[0]
    moments = Moments(
        int(mirror.requests.arrival_ns[row]),
        _known(history.request_times.started_ns(numbers)[0]),
        _known(history.request_times.first_token_ns(numbers)[0]),
        _known(last_ns if last_ns >= 0 else mirror.requests.finished_ns[row]),
        mirror.stops,
    )
    limit = mirror.limits[0] or mirror.hello.cache.max_num_seqs
    return Delays(events, limit).chain(number, moments, int(mirror.requests.num_output_tokens[row]))


def linked(lines: Iterable[str], number: int | None) -> str:
    """As HTML, a line each: `#7` is a link to request 7, but for `number` itself."""

    def link(found: re.Match[str]) -> str:
        other = found.group(1)
        return found.group() if int(other) == number else f'<a href="{int(other)}">#{other}</a>'

    return "<br>".join(_NAMED.sub(link, escape(line, quote=False)) for line in lines)


def _known(time_ns: int) -> int | None:
    return None if time_ns < 0 else int(time_ns)

"""Current rates, shares and latencies: means over the `RECENT_S` seconds before the shown time. Imports no Qt.

The figures do not depend on the time range of a chart. In a recording, and whenever the cursor is not at the live end,
they are those of `summaries.run_figures` for the last whole seconds, so that an export of the same range has the same
values. At the live end they are computed from the bins of the history, because the overview lags behind by seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from kvscope_app.session.history import BIN_NS, HISTOGRAMS
from kvscope_app.session.session import Session
from kvscope_telemetry.summaries.run_figures import BY_KEY, covered_s, rows_in
from kvscope_telemetry.summaries.summary import SECOND_NS

RECENT_S: Final = 10
_RECENT_NS: Final = RECENT_S * SECOND_NS
_TOKENS: Final = ("prefill_tokens", "decode_tokens")


class RecentSpan(NamedTuple):
    """Range of whole seconds on the wall clock, both ends inclusive."""

    from_ns: int
    until_ns: int


def recent_span(session: Session) -> RecentSpan:
    """Return the last `RECENT_S` whole seconds before the shown time, clipped to the recorded range."""
    end_ns, range_ns = session.timeline.cursor_ns // SECOND_NS * SECOND_NS, session.timeline.range_ns
    begin_ns = end_ns - _RECENT_NS
    return RecentSpan(begin_ns if range_ns is None else max(begin_ns, range_ns[0]), end_ns - 1)


def recent_sums(session: Session, names: Iterable[str]) -> tuple[Mapping[str, float], float]:
    """Return sums of columns of `history.SUMS` (NaN if unknown), and the number of seconds they cover,
    excluding pauses.
    """
    return _overview_sums(session, names) if session.timeline.player is not None else _history_sums(session, names)


def recent_rate(session: Session, name: str) -> float:
    """Return the column `name` of `history.SUMS` per second; NaN if it is unknown or no time is covered."""
    sums, length_s = recent_sums(session, (name,))
    return sums[name] / length_s if length_s > 0 else np.nan


def recent_latency(session: Session, prefix: str) -> tuple[float, float]:
    """Return p50 and p95 in seconds of the latencies in `recent_span`. `prefix` is a key of `history.HISTOGRAMS`."""
    if session.timeline.player is not None:
        span = recent_span(session)
        p50, p95 = (BY_KEY[f"{HISTOGRAMS[prefix]}_p{p}_s"].of(session.overview, span) for p in (50, 95))
        return np.nan if p50 is None else p50, np.nan if p95 is None else p95
    history, until_ns = session.history, session.timeline.shown_monotonic_ns
    window = {"ttft": history.first_token, "itl": history.inter_token, "queue": history.queued}[prefix]
    return window.between(until_ns - _RECENT_NS, until_ns)


def _overview_sums(session: Session, names: Iterable[str]) -> tuple[Mapping[str, float], float]:
    overview, span = session.overview, recent_span(session)
    rows = rows_in(overview, span)
    columns = {name: overview.column(f"{name}_per_s" if name in _TOKENS else name)[rows] for name in names}
    sums = {name: np.nan if np.isnan(column).all() else float(np.nansum(column)) for name, column in columns.items()}
    return sums, round(covered_s(overview, rows, span), 6)  # without the nanosecond that the span ends early


def _history_sums(session: Session, names: Iterable[str]) -> tuple[Mapping[str, float], float]:
    history = session.history
    until_ns = session.timeline.shown_monotonic_ns // BIN_NS * BIN_NS  # the bin in progress is not over
    columns = history.window(RECENT_S, until_ns - 1, {*names, "num_running"}).columns
    num_known = int(np.count_nonzero(np.isfinite(columns["num_running"][1:])))
    engine_ns = until_ns - history.offset_ns
    stopped_ns = session.mirror.stops.stopped_ns(engine_ns - num_known * BIN_NS, engine_ns)
    sums = {name: float(np.nansum(columns[name][1:])) if num_known else np.nan for name in names}
    return sums, num_known * BIN_NS / 1e9 - stopped_ns / 1e9

"""The key figures of a run: each is one number of a range of seconds, and the same of a part of it.

Owns which there are, their units and how they are computed from a course. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.exports.digest import fragmentation_of, quantile_of, rows_in, usage_of
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.summary import SECOND_NS

Measure = Callable[[Course, slice, Span], float | None]
"""Of these seconds of a course, which are those of the span; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    key: str
    """With its unit. Never changes: scripts find it by this."""
    label: str
    unit: str
    """"s", "share" (0 to 1), "tokens/s", "requests", "1/min", …"""
    measure: Measure
    has_spread: bool = True
    """Whether a part of the run tells what the whole may have been: not of a length, a count and a peak."""
    tip: str = ""


def _length(course: Course, rows: slice, span: Span) -> float | None:
    return span.length_s


def _total(name: str, course: Course, rows: slice, span: Span) -> float | None:
    return _known_sum(course, name, rows) if _has_seconds(course, rows) else None


def _known_sum(course: Course, name: str, rows: slice) -> float | None:
    """None where the engine does not tell it."""
    column = course.column(name)[rows]
    return None if column.size and np.isnan(column).all() else float(np.nansum(column))


def _rate(name: str, per_s: float, course: Course, rows: slice, span: Span) -> float | None:
    """A second (or `per_s` seconds) of those that were recorded: silences do not count."""
    covered_s = _covered_s(course, rows, span)
    total = _known_sum(course, name, rows)
    return total / covered_s * per_s if total is not None and covered_s > 0 else None


def _mean(name: str, course: Course, rows: slice, span: Span) -> float | None:
    column = course.column(name)[rows]
    return float(np.nanmean(column)) if np.isfinite(column).any() else None


def _mean_usage(course: Course, rows: slice, span: Span) -> float | None:
    usage = usage_of(course)[rows]
    return float(np.nanmean(usage)) if np.isfinite(usage).any() else None


def _peak_usage(course: Course, rows: slice, span: Span) -> float | None:
    usage = usage_of(course)[rows]
    return float(np.nanmax(usage)) if np.isfinite(usage).any() else None


def _mean_fragmentation(course: Course, rows: slice, span: Span) -> float | None:
    scattered = fragmentation_of(course)[rows]
    return float(np.nanmean(scattered)) if np.isfinite(scattered).any() else None


def _hit_rate(course: Course, rows: slice, span: Span) -> float | None:
    cached, computed = (_known_sum(course, name, rows) for name in ("cached_tokens", "prefill_tokens"))
    if cached is None or computed is None or cached + computed <= 0:
        return None
    return cached / (cached + computed)


def _latency(name: str, share: float, course: Course, rows: slice, span: Span) -> float | None:
    return quantile_of(course, name, share, rows)


def _has_seconds(course: Course, rows: slice) -> bool:
    return len(course.time_ns[rows]) > 0


def _covered_s(course: Course, rows: slice, span: Span) -> float:
    """How much of the span those seconds are: the first and the last may be parts."""
    begins = np.maximum(course.time_ns[rows], span.from_ns)
    ends = np.minimum(course.time_ns[rows] + SECOND_NS, span.until_ns)
    return float(np.maximum(ends - begins, 0).sum()) / 1e9


def windows(course: Course, span: Span, number: int) -> list[tuple[slice, Span]]:
    """`span` in so many parts of equal length, each with whole seconds of the course."""
    rows = rows_in(course, span)
    edges = span.from_ns + (span.until_ns - span.from_ns) * np.arange(number + 1) // number
    cuts = np.searchsorted(course.time_ns[rows], edges[1:-1], "left") + rows.start
    places = [rows.start, *cuts.tolist(), rows.stop]
    found = []
    for first, last in pairwise(places):
        begin = max(int(course.time_ns[first]), span.from_ns) if first < last else span.from_ns
        end = min(int(course.time_ns[last - 1]) + SECOND_NS, span.until_ns) if first < last else span.from_ns
        found.append((slice(first, last), Span(span.start_ns, begin, end)))
    return found


_HIT_TIP: Final = "Prompt tokens that were taken from the prefix cache, of those and the ones that were computed"
_SCATTERED_TIP: Final = "Share of the free blocks that the longest free run has not, on average"
FIGURES: Final = (
    Figure("length_s", "Length", "s", _length, has_spread=False),
    Figure("finished", "Requests finished", "requests", partial(_total, "finished"), has_spread=False),
    Figure("finished_per_min", "Requests finished a minute", "1/min", partial(_rate, "finished", 60.0)),
    Figure("decode_tokens_per_s", "Tokens generated a second", "tokens/s", partial(_rate, "decode_tokens", 1.0)),
    Figure(
        "prefill_tokens_per_s", "Prompt tokens computed a second", "tokens/s", partial(_rate, "prefill_tokens", 1.0)
    ),
    Figure("first_token_p50_s", "First token, p50", "s", partial(_latency, "first_token", 0.50)),
    Figure("first_token_p95_s", "First token, p95", "s", partial(_latency, "first_token", 0.95)),
    Figure("inter_token_p50_s", "Between tokens, p50", "s", partial(_latency, "inter_token", 0.50)),
    Figure("inter_token_p95_s", "Between tokens, p95", "s", partial(_latency, "inter_token", 0.95)),
    Figure("queued_p95_s", "Queued, p95", "s", partial(_latency, "queued", 0.95)),
    Figure("running_mean", "Running, mean", "requests", partial(_mean, "num_running")),
    Figure("waiting_mean", "Waiting, mean", "requests", partial(_mean, "num_waiting")),
    Figure("usage_mean", "KV usage, mean", "share", _mean_usage),
    Figure("usage_peak", "KV usage, peak", "share", _peak_usage, has_spread=False),
    Figure("external_fragmentation", "External fragmentation", "share", _mean_fragmentation, tip=_SCATTERED_TIP),
    Figure("preemptions", "Preemptions", "preemptions", partial(_total, "preemptions"), has_spread=False),
    Figure("preemptions_per_min", "Preemptions a minute", "1/min", partial(_rate, "preemptions", 60.0)),
    Figure("evicted_blocks_per_min", "Evicted blocks a minute", "1/min", partial(_rate, "evicted_blocks", 60.0)),
    Figure("copied_blocks_per_min", "Copied blocks a minute", "1/min", partial(_rate, "copied_blocks", 60.0)),
    Figure("hit_rate", "Prefix hit rate", "share", _hit_rate, tip=_HIT_TIP),
)

"""Which figures two runs are compared by, and the parts of a run that tell how far each strays.

What they are is `summaries.figures`'.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.summaries import figures
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.figures import rows_in
from kvscope_telemetry.summaries.summary import SECOND_NS

FIGURES: Final = tuple(figure for figure in figures.FIGURES if figure.is_compared)


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

"""Two runs side by side: the key figures of each, how far they are apart, and what that is beside their own spread.

Made of the courses alone: it costs no replaying. Knows no words but the figures' own, and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.exports.comparison.figures import FIGURES, windows
from kvscope_telemetry.exports.comparison.spread import (
    MIN_WINDOW_S,
    NUM_WINDOWS,
    UNKNOWN_SPREAD,
    Spread,
    Verdict,
    judge,
    spread_of,
)
from kvscope_telemetry.exports.digest import Digest, digest
from kvscope_telemetry.exports.span import Exported, Span
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.figures import Figure

_EACH, _BOUNDS = "told one by one", "upper bounds, from histograms"
_POOL: Final = {
    "num_blocks": "blocks",
    "block_size_tokens": "block size",
    "dtype": "KV type",
    "allocator": "allocator",
    "prefix_caching": "prefix caching",
    "num_host_blocks": "host blocks",
    "num_disk_blocks": "disk blocks",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two: a range of a recording, with the recording's course."""

    recording: Exported
    course: Course
    span: Span


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both. None: not known."""

    key: str
    label: str
    unit: str
    a: float | None
    b: float | None
    difference: float | None
    """b - a."""
    a_spread: float | None
    """Another run like it is that near in 19 of 20 cases; None where a run does not tell."""
    b_spread: float | None
    spread: float | None
    """Two runs of the same are that near in 19 of 20 cases."""
    times_spread: float | None
    """How many times that the difference is."""
    verdict: Verdict


class Setting(msgspec.Struct, frozen=True):
    """What was not alike before anything ran."""

    name: str
    a: str
    b: str


class Comparison(msgspec.Struct, frozen=True):
    """All of it."""

    a: Digest
    b: Digest
    settings: tuple[Setting, ...]
    """Where the two engines are not alike."""
    rows: tuple[Row, ...]


def compare(a: Run, b: Run) -> Comparison:
    """The figures of both."""
    of_a, of_b = (digest(run.recording, run.course, run.span) for run in (a, b))
    return Comparison(of_a, of_b, _unlike(of_a, of_b), tuple(_row(figure, a, b) for figure in FIGURES))


def _row(figure: Figure, a: Run, b: Run) -> Row:
    value_a, value_b = (figure.of(run.course, run.span) for run in (a, b))
    spread_a, spread_b = _spread(figure, a), _spread(figure, b)
    judged = judge(value_a, value_b, spread_a, spread_b)
    verdict = judged.verdict
    if not figure.has_spread and verdict is not Verdict.EQUAL:
        verdict = Verdict.NONE
    return Row(
        key=figure.key,
        label=figure.name,
        unit=figure.unit,
        a=value_a,
        b=value_b,
        difference=None if value_a is None or value_b is None else value_b - value_a,
        a_spread=spread_a.within,
        b_spread=spread_b.within,
        spread=judged.within,
        times_spread=judged.times,
        verdict=verdict,
    )


def _spread(figure: Figure, run: Run) -> Spread:
    if not figure.has_spread or run.span.length_s < NUM_WINDOWS * MIN_WINDOW_S:
        return UNKNOWN_SPREAD
    parts = windows(run.course, run.span, NUM_WINDOWS)
    values = [figure.measure(run.course, rows, span) for rows, span in parts if rows.stop > rows.start]
    return spread_of(np.array([np.nan if value is None else value for value in values]))


def _unlike(a: Digest, b: Digest) -> tuple[Setting, ...]:
    pairs = [
        ("model", a.model, b.model),
        ("device", a.device, b.device),
        ("engine", a.engine_version, b.engine_version),
    ]
    latencies_a, latencies_b = (_BOUNDS if one.latencies_are_bounds else _EACH for one in (a, b))
    pairs += [("latencies", latencies_a, latencies_b)]
    pairs += [(name, _word(getattr(a.pool, field)), _word(getattr(b.pool, field))) for field, name in _POOL.items()]
    return tuple(Setting(name, of_a, of_b) for name, of_a, of_b in pairs if of_a != of_b)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)

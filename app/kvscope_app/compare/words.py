"""A comparison in words, for the window and for the terminal. Knows no Qt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvscope_app.look.number_text import NOTHING, count, percent, seconds, short
from kvscope_telemetry.exports.comparison.comparison import Comparison, Row
from kvscope_telemetry.exports.comparison.spread import Verdict

HEADINGS: Final = ("", "A", "B", "Difference", "The difference is")
_VERDICTS: Final = {
    Verdict.EQUAL: "equal",
    Verdict.WITHIN: "within their own spread",
    Verdict.LARGER: "larger than their own spread",
    Verdict.UNTOLD: "too little to tell",
}
_MANY_TIMES: Final = 100.0
_LEAST_SHARE: Final = 0.005
_MOST_SHARE: Final = 10.0
"""Of A: what is less, or more, says nothing to a person."""


def cells(row: Row) -> tuple[str, ...]:
    """One a heading."""
    return row.label, value_text(row, row.a), value_text(row, row.b), difference_text(row), verdict_text(row)


def value_text(row: Row, value: float | None) -> str:
    """A figure with its unit."""
    return NOTHING if value is None else _FORMS.get(row.unit, short)(value)


def difference_text(row: Row) -> str:
    """`+12.0 %  (+30 %)`: in the figure's unit, and as a share of A."""
    if row.difference is None or row.a is None:
        return NOTHING
    if row.verdict is Verdict.EQUAL or row.difference == 0:
        return "0"
    sign = "+" if row.difference > 0 else "−"
    told = value_text(row, abs(row.difference))
    if row.unit == "share":
        points = 100 * abs(row.difference)
        return f"{sign}{points:.1f} points" if points >= 0.05 else f"{sign}{points:.2g} points"
    share = abs(row.difference / row.a) if row.a else math.inf
    return f"{sign}{told} ({sign}{percent(share, 0)})" if _LEAST_SHARE <= share < _MOST_SHARE else sign + told


def verdict_text(row: Row) -> str:
    """What the difference is beside what the runs vary by themselves."""
    if row.verdict is Verdict.LARGER and row.times_spread is not None:
        times = row.times_spread
        return (
            f"larger: {times:.1f} × their own spread" if times < _MANY_TIMES else "larger by far than their own spread"
        )
    return _VERDICTS.get(row.verdict, NOTHING)


def explained(row: Row) -> str:
    """The same in sentences."""
    if row.spread is None or row.a_spread is None or row.b_spread is None:
        return "Of a length, a count and a peak a run does not tell how much they vary." if not row.verdict else ""
    of_a, of_b = (
        f"{value_text(row, v)} ± {value_text(row, s)}" for v, s in ((row.a, row.a_spread), (row.b, row.b_spread))
    )
    near = value_text(row, row.spread)
    return (
        f"A is {of_a}, B is {of_b}. Two runs of the same are within {near} of each other in 19 of 20 cases, as far as"
        f" these two tell: the difference is {row.verdict.value}."
    )


def unlike_text(comparison: Comparison) -> str:
    """Where the two engines differ; empty where they do not."""
    return "; ".join(f"{each.name} {each.a or 'unknown'} | {each.b or 'unknown'}" for each in comparison.settings)


def as_tsv(rows: Sequence[Row]) -> str:
    """As it is shown, with tabs."""
    return "\n".join("\t".join(line) for line in (HEADINGS, *(cells(row) for row in rows)))


def as_text(comparison: Comparison, names: tuple[str, str]) -> str:
    """For a terminal."""
    lines = [HEADINGS, *(cells(row) for row in comparison.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS) - 1)]
    text = [f"{side}  {name}" for side, name in zip("AB", names, strict=True)]
    if comparison.settings:
        text.append(f"not alike: {unlike_text(comparison)}")
    return "\n".join([*text, "", *(_line(line, widths) for line in lines)])


def _line(line: tuple[str, ...], widths: list[int]) -> str:
    label, *numbers, verdict = line
    middle = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([label.ljust(widths[0]), *middle, verdict]).rstrip()


def _rate(unit: str) -> Callable[[float], str]:
    return lambda value: f"{_plain(value)} {unit}"


def _plain(value: float) -> str:
    return f"{value:.2f}" if 0 < value < 10 else short(value)


_FORMS: Final[dict[str, Callable[[float], str]]] = {
    "s": seconds,
    "share": percent,
    "tokens/s": _rate("tok/s"),
    "1/min": _rate("/min"),
    "requests": lambda value: count(value) if value == int(value) else _plain(value),
    "preemptions": count,
}

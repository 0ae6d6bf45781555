"""Comparison as text, for the window and the terminal. Imports no Qt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvscope_app.ui.number_text import NOTHING, count, percent, seconds, short
from kvscope_telemetry.exports.comparison.comparison import Comparison, ComparisonRow, RunParts
from kvscope_telemetry.exports.comparison.spread import NUM_WINDOWS, Method, Verdict
from kvscope_telemetry.printable import printable

HEADINGS: Final = ("", "A", "B", "Difference", "95 % interval", "A over time", "B over time")
_VERDICT_TEXTS: Final = {
    Verdict.EQUAL: "equal",
    Verdict.OPEN: "not significant: ",
    Verdict.DIFFERENT: "",
    Verdict.UNKNOWN: "not enough data",
}
_PARTS_TIP: Final = "5th, 50th and 95th percentile of the parts of a run"
_MIN_SHARE: Final = 0.005
_MAX_SHARE: Final = 10.0
"""Difference as a fraction of A's value, from which on no percentage is shown. Nor is one shown below `_MIN_SHARE`."""


def cells(row: ComparisonRow) -> tuple[str, ...]:
    """Return the texts of a row's cells, one for each of `HEADINGS`."""
    values = (value_text(row, row.a), value_text(row, row.b), difference_text(row))
    return row.label, *values, verdict_text(row), parts_text(row, row.a_parts), parts_text(row, row.b_parts)


def value_text(row: ComparisonRow, value: float | None) -> str:
    return NOTHING if value is None else _FORMATS.get(row.unit, short)(value)


def difference_text(row: ComparisonRow) -> str:
    """Return the difference in the figure's unit and as a percentage of A: `+12.0 ms (+30 %)`."""
    if row.difference is None or row.a is None:
        return NOTHING
    if row.verdict is Verdict.EQUAL or row.difference == 0:
        return "0"
    sign = "+" if row.difference > 0 else "−"
    value = value_text(row, abs(row.difference))
    if row.unit == "share":
        points = 100 * abs(row.difference)
        return f"{sign}{points:.1f} points" if points >= 0.05 else f"{sign}{points:.2g} points"
    share = abs(row.difference / row.a) if row.a else math.inf
    return f"{sign}{value} ({sign}{percent(share, 0)})" if _MIN_SHARE <= share < _MAX_SHARE else sign + value


def parts_text(row: ComparisonRow, parts: RunParts | None) -> str:
    """Return the figure's 5th, 50th and 95th percentile over equally long parts of a run: `8.1 – 9.4 – 12.0 ms`."""
    if parts is None:
        return NOTHING
    low, middle, high = (value_text(row, value) for value in (parts.p5, parts.p50, parts.p95))
    unit = high.partition(" ")[2]
    return " – ".join(text.removesuffix(f" {unit}") if unit else text for text in (low, middle)) + f" – {high}"


def verdict_text(row: ComparisonRow) -> str:
    """Return the 95 % interval of the difference, and the number (n) of time windows of each run that it is
    based on.
    """
    verdict = _VERDICT_TEXTS.get(row.verdict, NOTHING)
    if row.verdict is Verdict.UNKNOWN:
        return f"{verdict} (n = {min(row.a_windows, row.b_windows)})"
    if row.verdict not in (Verdict.OPEN, Verdict.DIFFERENT):
        return verdict
    return f"{verdict}{_interval(row)} (n = {row.a_windows} + {row.b_windows})"


def explanation_text(row: ComparisonRow) -> str:
    spread = f"Over time A is {parts_text(row, row.a_parts)} and B {parts_text(row, row.b_parts)}: {_PARTS_TIP}."
    if not row.verdict:
        return "Lengths, counts and peaks have one value per run, so their spread is unknown."
    if row.low is None:
        num_known = f"The figure is known in {row.a_windows} (A) and {row.b_windows} (B) of {NUM_WINDOWS} parts"
        return f"{num_known}: too few for a test. {spread}" if row.verdict is Verdict.UNKNOWN else spread
    basis = f"{row.test.value}, with {row.a_windows} parts of A and {row.b_windows} of B"
    caveat = " Two runs of the same workload may differ this much; this does not mean that they are alike."
    suffix = caveat if row.verdict is Verdict.OPEN else ""
    return f"{basis}: {_interval(row)}, in 19 of 20 cases.{suffix} {spread}"


def _interval(row: ComparisonRow) -> str:
    """Return the 95 % interval as a ratio (`B is 1.1 to 1.3 × A`) or as a difference (`B − A is +1 ms to +3 ms`)."""
    assert row.low is not None, "there is an interval where there is a test"
    assert row.high is not None, "there is an interval where there is a test"
    if row.test is Method.RATIO:
        return f"B is {_factor(row.low)} to {_factor(row.high)} × A"
    return f"B − A is {_signed(row, row.low)} to {_signed(row, row.high)}"


def _factor(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value >= 0.001 else "< 0.001"


def _signed(row: ComparisonRow, value: float) -> str:
    if row.unit == "share":
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{'+' if value >= 0 else '−'}{value_text(row, abs(value))}"


def differing_settings_text(comparison: Comparison) -> str:
    return printable(
        "; ".join(f"{each.name} {each.a or 'unknown'} | {each.b or 'unknown'}" for each in comparison.settings)
    )


def as_tsv(rows: Sequence[ComparisonRow]) -> str:
    return "\n".join("\t".join(line) for line in (HEADINGS, *(cells(row) for row in rows)))


def as_text(comparison: Comparison, names: tuple[str, str]) -> str:
    lines = [HEADINGS, *(cells(row) for row in comparison.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = [f"{side}  {name}" for side, name in zip("AB", names, strict=True)]
    if comparison.settings:
        text.append(f"settings differ: {differing_settings_text(comparison)}")
    return "\n".join([*text, "", *(_line(line, widths) for line in lines)])


def _line(line: tuple[str, ...], widths: list[int]) -> str:
    label, *values, last = line
    interval_column = HEADINGS.index("95 % interval") - 1
    middle = [
        value.ljust(width) if column == interval_column else value.rjust(width)
        for column, (value, width) in enumerate(zip(values, widths[1:-1], strict=True))
    ]
    return "  ".join([label.ljust(widths[0]), *middle, last.rjust(widths[-1])]).rstrip()


def _rate(unit: str) -> Callable[[float], str]:
    return lambda value: f"{_plain(value)} {unit}"


def _plain(value: float) -> str:
    return f"{value:.2f}" if 0 < value < 10 else short(value)


_FORMATS: Final[dict[str, Callable[[float], str]]] = {
    "s": seconds,
    "share": percent,
    "tokens/s": _rate("tok/s"),
    "1/min": _rate("/min"),
    "requests": lambda value: count(value) if value == int(value) else _plain(value),
    "preemptions": count,
}

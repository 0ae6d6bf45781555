"""Texts of an answer to a question: verdict, table of figures, and the error of the simulation. Imports no Qt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvscope_app.ui.number_text import NOTHING, count, percent, plural, rate, seconds
from kvscope_telemetry.messages.what_if_question import CHECKED, MAX_ERROR, WhatIfComparison, WhatIfFigures

HEADER: Final = ("", "Measured", "Simulated, as it was", "Simulated, changed", "Change")
HEADER_TIPS: Final = (
    "",
    "What the engine did",
    "Simulation of the recorded requests with the recorded settings. It should equal what was measured.",
    "Simulation of the same requests with the change",
    "Simulated with the change, compared with simulated as it was",
)
_NOTABLE: Final = 0.05
"""Smallest relative change that the verdict mentions."""


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    """Field of `WhatIfFigures`."""
    label: str
    short: str
    """Text within the verdict."""
    text: Callable[[float], str]
    is_better_higher: bool = False


_FIGURES: Final = (
    _Figure("ttft_p50_s", "Time to first token, median", "median time to first token", seconds),
    _Figure("ttft_p99_s", "Time to first token, p99", "time to first token (p99)", seconds),
    _Figure("tpot_p50_s", "Time per output token, median", "median time per output token", seconds),
    _Figure("tpot_p99_s", "Time per output token, p99", "time per output token (p99)", seconds),
    _Figure("tokens_per_s", "Throughput", "throughput", lambda value: rate(value, "tokens/s"), is_better_higher=True),
    _Figure("num_preemptions", "Preemptions", "preemptions", lambda value: count(round(value))),
)
_BY_NAME: Final = {figure.name: figure for figure in _FIGURES}


@dataclass(frozen=True, slots=True)
class FigureRow:
    cells: tuple[str, ...]
    """Texts of the columns in `HEADER`."""
    effect: int
    """1 if the figure became notably better, -1 if worse, 0 otherwise."""


def figure_rows(comparison: WhatIfComparison) -> list[FigureRow]:
    return [
        FigureRow(
            (
                figure.label,
                *(_text(figure, each) for each in (comparison.measured, comparison.unchanged, comparison.changed)),
                _difference(figure, comparison),
            ),
            _effect(figure, comparison),
        )
        for figure in _FIGURES
    ]


def verdict(comparison: WhatIfComparison) -> str:
    """Return one sentence that answers whether the change would have helped."""
    effects = {figure: _effect(figure, comparison) for figure in _FIGURES}
    better = [_change_text(figure, comparison) for figure, effect in effects.items() if effect > 0]
    worse = [_change_text(figure, comparison) for figure, effect in effects.items() if effect < 0]
    refused = comparison.changed.num_refused - comparison.unchanged.num_refused
    if refused > 0:
        worse.append(f"{plural(refused, 'request')} would not fit at all")
    if better and worse:
        return f"Partly: {_joined(better)}. But {_joined(worse)}."
    if better:
        return f"Yes: {_joined(better)}."
    if worse:
        return f"No, it would have been worse: {_joined(worse)}."
    return "No: little would have changed."


def reliability(comparison: WhatIfComparison) -> str:
    """Return the errors of the simulation of the recorded settings, as one line."""
    parts = [f"{_BY_NAME[name].short} {_error_text(error)}" for name, error in comparison.errors.items()]
    assert len(parts) == len(CHECKED), "one error for each checked figure"
    text = f"Error of the simulation as it was: {', '.join(parts)}."
    limit = f"{MAX_ERROR * 100:.0f} %"
    return text if comparison.is_reliable else f"Unreliable: an error is above {limit}. {text}"


def basis(comparison: WhatIfComparison) -> str:
    runs = f", medians of {count(comparison.num_runs)} simulations" if comparison.num_runs > 1 else ""
    lines = [f"{plural(comparison.num_requests, 'request')}{runs}.", *comparison.notes]
    return "\n".join(lines)


def _text(figure: _Figure, figures: WhatIfFigures) -> str:
    value = getattr(figures, figure.name)
    return NOTHING if value is None else figure.text(value)


def _values(figure: _Figure, comparison: WhatIfComparison) -> tuple[float, float] | None:
    before, after = getattr(comparison.unchanged, figure.name), getattr(comparison.changed, figure.name)
    return None if before is None or after is None else (before, after)


def _difference(figure: _Figure, comparison: WhatIfComparison) -> str:
    values = _values(figure, comparison)
    if values is None:
        return NOTHING
    before, after = values
    if not before:
        return "none" if not after else f"+{figure.text(after)}"
    change = round(100 * (after / before - 1))
    return "none" if not change else f"{'+' if change > 0 else '−'}{abs(change)} %"


def _effect(figure: _Figure, comparison: WhatIfComparison) -> int:
    values = _values(figure, comparison)
    if values is None:
        return 0
    before, after = values
    if abs(after - before) <= _NOTABLE * max(before, after):
        return 0
    return 1 if (after > before) == figure.is_better_higher else -1


def _change_text(figure: _Figure, comparison: WhatIfComparison) -> str:
    return f"{figure.short} {_text(figure, comparison.unchanged)} → {_text(figure, comparison.changed)}"


def _error_text(error: float | None) -> str:
    if error is None:
        return NOTHING
    return "unlimited (0 were measured)" if math.isinf(error) else percent(error, 0)


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

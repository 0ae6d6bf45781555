"""Formats a comparison with a recording as a table for a terminal."""

from __future__ import annotations

from kvscope_engine.text_table import table
from kvscope_telemetry.messages.what_if_question import MAX_ERROR, WhatIfComparison

_ROWS = (
    ("first token p50, s", "ttft_p50_s", 3),
    ("first token p99, s", "ttft_p99_s", 3),
    ("per output token p50, s", "tpot_p50_s", 4),
    ("per output token p99, s", "tpot_p99_s", 4),
    ("output tokens/s", "tokens_per_s", 1),
    ("preemptions", "num_preemptions", 0),
)


def comparison_text(comparison: WhatIfComparison) -> str:
    errors = comparison.errors
    rows = [
        [
            label,
            *(
                _number(getattr(figures, name), digits)
                for figures in (comparison.measured, comparison.unchanged, comparison.changed)
            ),
            _percent(errors.get(name)),
        ]
        for label, name, digits in _ROWS
    ]
    header = ["figure", "measured", "as recorded", "with the options", "error %"]
    verdict = "reliable" if comparison.is_reliable else "UNRELIABLE"
    return (
        f"Measured and simulated (medians of {comparison.num_runs} simulations; {verdict}: errors of the simulation as"
        f" recorded are compared with {MAX_ERROR:.0%})\n{table(header, rows)}"
    )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"

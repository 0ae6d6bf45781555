"""Converts a comparison to a table for other tools, with one row per figure. Numbers are in the unit named in their
row.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from kvscope_telemetry.exports.comparison.comparison import Comparison, RunParts
from kvscope_telemetry.exports.tables.csv_file import write_csv
from kvscope_telemetry.exports.tables.table import Column, Table

_NUMBERS = ("a", "b", "difference", "a_windows", "b_windows", "low", "high")
_QUANTILES = ("p5", "p50", "p95")


def comparison_table(comparison: Comparison) -> Table:
    rows = comparison.rows
    texts = [Column(name, "text", [str(getattr(row, name)) for row in rows]) for name in ("key", "label", "unit")]
    numbers = [
        Column(name, "float", np.array([np.nan if (value := getattr(row, name)) is None else value for row in rows]))
        for name in _NUMBERS
    ]
    judged = [Column(name, "text", [getattr(row, name).value for row in rows]) for name in ("verdict", "test")]
    parts = [
        Column(f"{side}_{name}", "float", np.array([_quantile(getattr(row, f"{side}_parts"), name) for row in rows]))
        for side in "ab"
        for name in _QUANTILES
    ]
    return Table("comparison", (*texts, *numbers, *judged, *parts), {})


def _quantile(parts: RunParts | None, name: str) -> float:
    return np.nan if parts is None else float(getattr(parts, name))


def write_comparison_csv(comparison: Comparison, file: BinaryIO) -> None:
    write_csv(comparison_table(comparison), file)

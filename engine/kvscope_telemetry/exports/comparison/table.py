"""The comparison as a table for other tools: numbers with their units, a row a figure."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from kvscope_telemetry.exports.comparison.comparison import Comparison
from kvscope_telemetry.exports.tables.csv_file import write_csv
from kvscope_telemetry.exports.tables.table import Column, Table

_NUMBERS = ("a", "b", "difference", "a_spread", "b_spread", "spread", "times_spread")


def comparison_table(comparison: Comparison) -> Table:
    """A row a figure; numbers are in the row's unit."""
    rows = comparison.rows
    texts = [Column(name, "text", [str(getattr(row, name)) for row in rows]) for name in ("key", "label", "unit")]
    numbers = [
        Column(name, "float", np.array([np.nan if (value := getattr(row, name)) is None else value for row in rows]))
        for name in _NUMBERS
    ]
    verdict = Column("verdict", "text", [row.verdict.value for row in rows])
    return Table("comparison", (*texts, *numbers, verdict), {})


def write_comparison_csv(comparison: Comparison, file: BinaryIO) -> None:
    """As CSV."""
    write_csv(comparison_table(comparison), file)

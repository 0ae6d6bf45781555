"""Colour of a process in the memory bar of a device and in the table of processes."""

from __future__ import annotations

from kvscope_app.ui.theme import Theme


def process_color(index: int, theme: Theme) -> str:
    """Return the colour (`#rrggbb`) of bar segment `index`, or grey if `index` is negative: the segment is not
    one process.
    """
    *series, grey = theme.series
    return grey if index < 0 else series[index % len(series)]

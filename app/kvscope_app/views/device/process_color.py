"""Colour of a process in the memory bar of a device, and next to its name in the table."""

from __future__ import annotations

from kvscope_app.ui.theme import Theme


def process_color(index: int, theme: Theme) -> str:
    """Return the colour `#rrggbb` of the segment `index`; a negative index means no single process."""
    *series, grey = theme.series
    return grey if index < 0 else series[index % len(series)]

"""The colour of a process in the bar of a device's memory, and beside its name in the table."""

from __future__ import annotations

from kvscope_app.look.theme import Theme


def piece_color(place: int, theme: Theme) -> str:
    """`#rrggbb` of the segment at `place`; a negative one is of no single process."""
    *series, grey = theme.series
    return grey if place < 0 else series[place % len(series)]

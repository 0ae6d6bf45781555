"""From a request of the timeline to the one in the row above or below. Knows no widget."""

from __future__ import annotations

import numpy as np

from kvscope_app.views.timeline.lane_picture import Shown
from kvscope_app.views.timeline.lane_words import Found


def next_in_rows(
    shown: Shown, selected: tuple[int, int] | None, sign: int, cursor_ns: int, in_sight: range
) -> tuple[int, Found] | None:
    """A row and whom it is about; None where no request is in the span.

    `selected` is epoch and number; from one that is not in `in_sight`, the rows that are seen, it goes on at their
    edge. Of requests that share a row the one nearest to `cursor_ns` is meant.
    """
    last = shown.num_rows - 1
    if last < 0:
        return None
    row = _row_of(shown, selected)
    if row in in_sight:
        row = min(max(row + sign, 0), last)
    else:
        row = min(in_sight.start if sign > 0 else in_sight.stop - 1, last)
    lives = shown.lanes.lives
    places = np.flatnonzero(shown.rows == row)
    begins, ends = lives["begin"][places], np.minimum(lives["end"][places], shown.until_ns)
    away = np.maximum(begins - cursor_ns, cursor_ns - ends).clip(0)
    nearest = int(away.argmin())
    life = int(places[nearest])
    time_ns = min(max(cursor_ns, int(begins[nearest])), int(ends[nearest]))
    return row, Found(time_ns, epoch=int(lives["epoch"][life]), number=int(lives["number"][life]))


def _row_of(shown: Shown, selected: tuple[int, int] | None) -> int:
    life = None if selected is None else shown.lanes.life_of(*selected)
    return -1 if life is None or life >= shown.rows.size else int(shown.rows[life])

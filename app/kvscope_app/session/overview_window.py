"""The overview of a whole session as what charts draw: bins of a second in place of the history's, however long ago.

Owns the way from one clock to the other: the overview's is the wall's, charts' is this machine's monotonic one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from kvscope_app.session.history import KNOWN_SUMS, SAMPLE_GAUGES, HistoryWindow
from kvscope_app.session.past import OVERVIEW_NAMES, history_column
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

LONG_SILENCE_NS: Final = 60 * SECOND_NS
MAX_SECONDS: Final = 400_000
"""More than four days: of a longer stretch the newest are drawn."""


def first_of_note_ns(overview: SessionOverview, begin_ns: int, now_ns: int) -> int:
    """Where a live timeline is worth looking at, by the wall clock.

    What an engine tells first is as old as its last step, and its start is older: one that was idle for long would have
    a timeline of nothing but that. What comes before a long silence at the very beginning is left out.
    """
    for at_ns in [*overview.time_ns[:2].tolist(), now_ns, now_ns][:2]:
        if at_ns - begin_ns > LONG_SILENCE_NS:
            begin_ns = at_ns
    return begin_ns


def overview_span_ns(overview: SessionOverview) -> tuple[int, int] | None:
    """Where its first second begins and its last ends, by the wall clock; None while there is none."""
    return (int(overview.time_ns[0]), int(overview.time_ns[-1]) + SECOND_NS) if len(overview) else None


def overview_window(
    overview: SessionOverview, wall_ns: int, first_ns: int, last_ns: int, names: Iterable[str]
) -> HistoryWindow | None:
    """The seconds between two times of the monotonic clock, which `wall_ns` is added to for the wall's.

    A second that the overview leaves out is not known. `names` are the history's, or the overview's own. None where the
    overview has nothing there.
    """
    begin, end = overview.place_at(first_ns + wall_ns - SECOND_NS) + 1, overview.place_at(last_ns + wall_ns - 1) + 1
    if begin >= end:
        return None
    seconds = overview.time_ns[begin:end] // SECOND_NS
    num = min(int(seconds[-1] - seconds[0]) + 1, MAX_SECONDS)
    places = seconds - (seconds[-1] - num + 1)
    inside = places >= 0
    end_ns = (int(seconds[-1]) + 1) * SECOND_NS - wall_ns
    columns = {}
    for name in names:
        column = np.full(num, np.nan)
        column[places[inside]] = history_column(overview, name)[begin:end][inside]
        columns[name] = column
    time_s = np.arange(num, dtype=np.float64) - (num - 1)
    return HistoryWindow(time_s, columns, end_ns, SECOND_NS, is_over=True)


def known_in(overview: SessionOverview) -> set[str]:
    """Of what not every source has, what some second of the overview tells: as `History.known`."""
    found = {name for name in SAMPLE_GAUGES if np.isfinite(overview.column(name)).any()}
    found |= {name for name in KNOWN_SUMS if np.nan_to_num(overview.column(name)).any()}
    return found | ({"queue_p50_s"} if overview.column("queued_count").any() else set())


assert set(OVERVIEW_NAMES.values()) <= set(OVERVIEW_COLUMNS), "a column of the overview is called otherwise"

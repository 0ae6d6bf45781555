"""Chart data from the overview of a whole session: bins of one second, for any time range.

Converts between the overview's wall clock and the charts' monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from kvscope_app.session.history import KNOWN_SUMS, SAMPLE_GAUGES, HistoryWindow
from kvscope_app.session.history_backfill import OVERVIEW_NAMES, history_column
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

LONG_SILENCE_NS: Final = 60 * SECOND_NS
MAX_SECONDS: Final = 400_000
"""Maximum number of bins, more than four days. Only the newest seconds of a longer range are drawn."""


def first_relevant_ns(overview: SessionOverview, begin_ns: int, now_ns: int) -> int:
    """Return the wall-clock time at which a live timeline that is attached since `begin_ns` should begin.

    An engine that was idle for hours has one second of data from its start, or none, and then none until now. Such
    silences of more than a minute are left out: the timeline begins at the first data after them, or at `now_ns`.
    """
    first_ns, second_ns = [*overview.time_ns[:2].tolist(), now_ns, now_ns][:2]
    start_ns = first_ns if first_ns - begin_ns > LONG_SILENCE_NS else begin_ns
    return second_ns if second_ns - start_ns > LONG_SILENCE_NS else start_ns


def overview_span_ns(overview: SessionOverview) -> tuple[int, int] | None:
    """Return the wall-clock start of the first second and the end of the last; None if the overview is empty."""
    return (int(overview.time_ns[0]), int(overview.time_ns[-1]) + SECOND_NS) if len(overview) else None


def overview_window(
    overview: SessionOverview, wall_offset_ns: int, first_ns: int, last_ns: int, names: Iterable[str]
) -> HistoryWindow | None:
    """Return the seconds between two times on the monotonic clock, or None if the overview has no data there.

    Seconds that the overview omits are NaN.

    Args:
        wall_offset_ns: Nanoseconds to add to a time on the monotonic clock for the time on the wall clock.
        names: Columns, by the names of the history or of the overview.
    """
    begin = overview.index_at(first_ns + wall_offset_ns - SECOND_NS) + 1
    end = overview.index_at(last_ns + wall_offset_ns - 1) + 1
    if begin >= end:
        return None
    seconds = overview.time_ns[begin:end] // SECOND_NS
    num_seconds = min(int(seconds[-1] - seconds[0]) + 1, MAX_SECONDS)
    bins = seconds - (seconds[-1] - num_seconds + 1)
    is_inside = bins >= 0
    end_ns = (int(seconds[-1]) + 1) * SECOND_NS - wall_offset_ns
    columns = {}
    for name in names:
        column = np.full(num_seconds, np.nan)
        column[bins[is_inside]] = history_column(overview, name)[begin:end][is_inside]
        columns[name] = column
    time_s = np.arange(num_seconds, dtype=np.float64) - (num_seconds - 1)
    return HistoryWindow(time_s, columns, end_ns, SECOND_NS, is_complete=True)


def known_columns_of(overview: SessionOverview) -> set[str]:
    """Return the optional columns that have a value in any second of the overview, as in `History.known_columns`."""
    names = {name for name in SAMPLE_GAUGES if np.isfinite(overview.column(name)).any()}
    names |= {name for name in KNOWN_SUMS if np.nan_to_num(overview.column(name)).any()}
    return names | ({"queue_p50_s"} if overview.column("queued_count").any() else set())


assert set(OVERVIEW_NAMES.values()) <= set(OVERVIEW_COLUMNS), "a column of the overview is called otherwise"

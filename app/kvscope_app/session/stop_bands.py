"""Labelled bands for the times when the engine was paused or suspended. Imports no Qt.

The overview contains a stop only up to its newest second. A stop that is still in progress is drawn up to the shown
time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec.structs import replace

from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import seconds
from kvscope_telemetry.messages.telemetry import PAUSED, SUSPENDED, Stop
from kvscope_telemetry.running_time import RunningTime, stop_text
from kvscope_telemetry.summaries.session_overview import SessionOverview

_OVERVIEW_LATE_NS: Final = 6_000_000_000
"""Maximum delay of the overview while a view is open."""
_STOP_EVENT_KINDS: Final = ("engine_paused", "engine_resumed", "single_step")


class StopBand(NamedTuple):
    """Band of a stop. The times are in seconds on the chart's axis."""

    first_s: float
    last_s: float
    reason: str
    run: str = ""
    """Run "A" or "B", if the chart has the curves of two runs."""

    @property
    def texts(self) -> tuple[str, str, str]:
        """Labels, longest first."""
        short = PAUSED if self.reason.startswith(PAUSED) else SUSPENDED
        run = f"{self.run} " if self.run else ""
        return run + self.reason, run + (self.reason.rpartition(",")[0] or short), run + short


def stops_until(overview: SessionOverview, until_ns: int) -> RunningTime:
    """Return the stops of `overview`, extending one that may still be in progress to `until_ns` (wall clock)."""
    stops, phases = overview.stops, overview.events.find(kinds=_STOP_EVENT_KINDS)
    newest = max(stops, key=lambda stop: stop.end_ns, default=None)
    if newest is None or not len(overview) or newest.end_ns < int(overview.time_ns[-1]):
        return stops
    if phases.size and overview.events[int(phases[-1])].event.kind == "engine_resumed":
        return stops
    is_near = newest.end_ns < until_ns < newest.end_ns + _OVERVIEW_LATE_NS
    return RunningTime([*stops, replace(newest, end_ns=until_ns)]) if is_near else stops


def stop_bands(
    session: Session, first_s: float, last_s: float, zero_ns: int | None = None, run: str = ""
) -> list[StopBand]:
    """Return the bands between two times in seconds, which count from `zero_ns` (wall clock; default: zero of the
    monotonic clock).
    """
    zero_ns = session.history.wall_ns(0) if zero_ns is None else zero_ns
    stops = stops_until(session.overview, session.timeline.cursor_ns)
    found = stops.within(round(first_s * 1e9) + zero_ns, round(last_s * 1e9) + zero_ns)
    return [
        StopBand((stop.begin_ns - zero_ns) / 1e9, (stop.end_ns - zero_ns) / 1e9, _stop_text(stop, stops), run)
        for stop in found
    ]


def stop_text_at(overview: SessionOverview, time_ns: int) -> str:
    """Return why the engine did not run at `time_ns` (wall clock), or an empty text if it ran."""
    found = overview.stops.within(time_ns, time_ns + 1)
    return _stop_text(found[0], overview.stops) if found else ""


def _stop_text(part: Stop, stops: RunningTime) -> str:
    """Return the reason and the total duration of the stop that `part` belongs to; only a part of it may be visible."""
    whole = next(
        (stop for stop in stops if stop.begin_ns <= part.begin_ns < stop.end_ns and stop.kind == part.kind), part
    )
    return f"{stop_text(whole)}, {seconds((whole.end_ns - whole.begin_ns) / 1e9)}"

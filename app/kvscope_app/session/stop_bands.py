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

_MAX_OVERVIEW_DELAY_NS: Final = 6_000_000_000
"""Maximum delay in ns of the overview while a view is open."""
_STOP_EVENT_KINDS: Final = ("engine_paused", "engine_resumed", "single_step")


class StopBand(NamedTuple):
    first_s: float
    last_s: float
    reason: str
    run: str = ""
    """"A" or "B" if the chart has the curves of two runs, else empty."""

    @property
    def texts(self) -> tuple[str, str, str]:
        """Labels of the band, longest first, of which the chart draws the first that fits."""
        short = PAUSED if self.reason.startswith(PAUSED) else SUSPENDED
        run = f"{self.run} " if self.run else ""
        return run + self.reason, run + (self.reason.rpartition(",")[0] or short), run + short


def stops_until(overview: SessionOverview, until_ns: int) -> RunningTime:
    """Return the stops of `overview`. A stop that may still be in progress is extended to `until_ns` (wall clock)."""
    stops, pause_events = overview.stops, overview.events.find(kinds=_STOP_EVENT_KINDS)
    newest = max(stops, key=lambda stop: stop.end_ns, default=None)
    if newest is None or not len(overview) or newest.end_ns < int(overview.time_ns[-1]):
        return stops
    if pause_events.size and overview.events[int(pause_events[-1])].event.kind == "engine_resumed":
        return stops
    is_near = newest.end_ns < until_ns < newest.end_ns + _MAX_OVERVIEW_DELAY_NS
    return RunningTime([*stops, replace(newest, end_ns=until_ns)]) if is_near else stops


def stop_bands(
    session: Session, first_s: float, last_s: float, zero_ns: int | None = None, run: str = ""
) -> list[StopBand]:
    """Return the bands between two times, in seconds since `zero_ns` on the wall clock.

    The default of `zero_ns` is the zero of the monotonic clock.
    """
    zero_ns = session.history.wall_ns(0) if zero_ns is None else zero_ns
    stops = stops_until(session.overview, session.timeline.cursor_ns)
    visible_stops = stops.within(round(first_s * 1e9) + zero_ns, round(last_s * 1e9) + zero_ns)
    return [
        StopBand((stop.begin_ns - zero_ns) / 1e9, (stop.end_ns - zero_ns) / 1e9, _stop_text(stop, stops), run)
        for stop in visible_stops
    ]


def stop_text_at(overview: SessionOverview, time_ns: int) -> str:
    """Return why the engine did not run at `time_ns` (wall clock), or "" if it ran."""
    stops = overview.stops.within(time_ns, time_ns + 1)
    return _stop_text(stops[0], overview.stops) if stops else ""


def _stop_text(part: Stop, stops: RunningTime) -> str:
    """Return the reason and the total duration of the stop that contains `part`."""
    whole_stop = next(
        (stop for stop in stops if stop.begin_ns <= part.begin_ns < stop.end_ns and stop.kind == part.kind), part
    )
    return f"{stop_text(whole_stop)}, {seconds((whole_stop.end_ns - whole_stop.begin_ns) / 1e9)}"

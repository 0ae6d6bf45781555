"""Maps moments of one timeline to another, and finds named moments by which the two can be aligned.

Times are nanoseconds since 1970, on each recording's own clock. Must not depend on files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_telemetry.messages.event_kinds import EVENT_KINDS
from kvscope_telemetry.summaries.run_figures import peak_usage_of, peak_usage_time_ns
from kvscope_telemetry.summaries.session_overview import SessionOverview

_FIRST_OF: Final = {kind.name: f"first {kind.noun}" for kind in EVENT_KINDS if kind.is_first_named}
PEAK: Final = "peak of KV usage"


@dataclass(frozen=True, slots=True)
class AlignedMoment:
    name: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """Offset in nanoseconds from a moment of recording A to the corresponding moment of recording B."""

    offset_ns: int = 0

    @classmethod
    def of(cls, moment_a_ns: int, moment_b_ns: int) -> Alignment:
        """Return the alignment that maps `moment_a_ns` of recording A to `moment_b_ns` of recording B. If both
        are equal, the recordings use the same clock.
        """
        return cls(moment_b_ns - moment_a_ns)

    def to_b(self, time_ns: int) -> int:
        return time_ns + self.offset_ns

    def to_a(self, time_ns: int) -> int:
        return time_ns - self.offset_ns


def named_moments(overview: SessionOverview, bookmarks: Iterable[AlignedMoment] = ()) -> list[AlignedMoment]:
    """Return the named moments of a timeline, `bookmarks` last. Of moments with the same name, only the first is
    included.
    """
    found_moments = [
        AlignedMoment(name, time_ns)
        for kind, name in _FIRST_OF.items()
        if (time_ns := _first(overview, kind)) is not None
    ]
    peak_ns = peak_usage_time_ns(overview)
    if peak_ns is not None and np.nanmax(peak_usage_of(overview)) > 0:
        found_moments.append(AlignedMoment(PEAK, peak_ns))
    first_by_name: dict[str, AlignedMoment] = {}
    for moment in (*found_moments, *sorted(bookmarks, key=lambda each: each.time_ns)):
        first_by_name.setdefault(moment.name, moment)
    return list(first_by_name.values())


def shared_moments(a: Sequence[AlignedMoment], b: Sequence[AlignedMoment]) -> list[tuple[AlignedMoment, Alignment]]:
    """Return the moments of A whose names B has too, each with the alignment that it defines."""
    times_of_b = {moment.name: moment.time_ns for moment in b}
    return [(each, Alignment.of(each.time_ns, times_of_b[each.name])) for each in a if each.name in times_of_b]


def _first(overview: SessionOverview, kind: str) -> int | None:
    indices = overview.events.find(kinds=(kind,))
    return overview.events[int(indices[0])].time_ns if indices.size else None

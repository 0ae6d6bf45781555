"""Which moment of one timeline lies beside which of another, and by what moments two are laid side by side.

Times are nanoseconds since 1970, each by its own recording's clock. Knows no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_telemetry.messages.event_kinds import EVENT_KINDS
from kvscope_telemetry.summaries.figures import usage_of
from kvscope_telemetry.summaries.session_overview import SessionOverview

_FIRST_OF: Final = {kind.name: f"first {kind.noun}" for kind in EVENT_KINDS if kind.is_first_named}
PEAK: Final = "peak of KV usage"


@dataclass(frozen=True, slots=True)
class AlignedMoment:
    """A moment with a name: of the overview itself, or a bookmark."""

    name: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """How much later the moments of B are than those of A that they lie beside."""

    offset_ns: int = 0

    @classmethod
    def of(cls, moment_a_ns: int, moment_b_ns: int) -> Alignment:
        """These two lie side by side; equal ones: one clock for both."""
        return cls(moment_b_ns - moment_a_ns)

    def to_b(self, time_ns: int) -> int:
        """The moment of B beside A's."""
        return time_ns + self.offset_ns

    def to_a(self, time_ns: int) -> int:
        """The moment of A beside B's."""
        return time_ns - self.offset_ns


def moments(overview: SessionOverview, bookmarks: Iterable[AlignedMoment] = ()) -> list[AlignedMoment]:
    """The named moments of a timeline, `bookmarks` last; of those with one name the first."""
    found = [
        AlignedMoment(name, time_ns)
        for kind, name in _FIRST_OF.items()
        if (time_ns := _first(overview, kind)) is not None
    ]
    usage = usage_of(overview)
    if np.isfinite(usage).any() and np.nanmax(usage) > 0:
        found.append(AlignedMoment(PEAK, int(overview.time_ns[int(np.nanargmax(usage))])))
    known: dict[str, AlignedMoment] = {}
    for moment in (*found, *sorted(bookmarks, key=lambda each: each.time_ns)):
        known.setdefault(moment.name, moment)
    return list(known.values())


def shared(a: Sequence[AlignedMoment], b: Sequence[AlignedMoment]) -> list[tuple[AlignedMoment, Alignment]]:
    """Moments that both have, as they are in A, and how the two lie side by side then."""
    of_b = {moment.name: moment.time_ns for moment in b}
    return [(each, Alignment.of(each.time_ns, of_b[each.name])) for each in a if each.name in of_b]


def _first(overview: SessionOverview, kind: str) -> int | None:
    places = overview.events.find(kinds=(kind,))
    return overview.events[int(places[0])].time_ns if places.size else None

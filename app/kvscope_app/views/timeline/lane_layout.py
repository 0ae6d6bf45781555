"""Which lanes there are, and where each is in pixels of the widget. Knows no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvscope_app.look.zoom import scaled
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS

GUTTER: Final = 104
"""Names of the lanes stand here, left of the time."""
AXIS_HEIGHT: Final = 20
_GAP: Final = 2
ROW_HEIGHT: Final = 15
_LOW: Final = 380
"""In a widget lower than this lanes are lower too."""
LEGEND_HEIGHT: Final = 16
_LEGEND_FROM: Final = 300
"""In a lower widget there is no line that says what the colours of requests are."""


def gutter() -> int:
    """`GUTTER` at the zoom of now; so are the next two."""
    return scaled(GUTTER)


def axis_height() -> int:
    """Of the line of times."""
    return scaled(AXIS_HEIGHT)


def row_height() -> int:
    """Of a request."""
    return scaled(ROW_HEIGHT)


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane above the requests."""

    name: str
    title: str
    low: int
    high: int
    """Its height in a low and in a high widget."""


@dataclass(frozen=True, slots=True)
class TickLane:
    """A lane with a mark for each moment in which something happened."""

    title: str
    color: str
    """Of the theme."""
    column: str
    """Of a summary: how many there were in a second; empty: nobody counts them."""
    counted: str
    """What one of those is called."""
    kind: str = ""
    """Of the events that tell them; empty: seconds alone do."""


def _tick_lanes() -> dict[str, TickLane]:
    """By name: one of each kind of event that has a lane, and beside it what only seconds tell."""
    beside = {
        "preempted": {"swapped": TickLane("Swaps", "flash_saved", "swapped_blocks", "swapped block", "preempted")},
        "evicted": {"copied": TickLane("Copy-on-write", "flash_copied", "copied_blocks", "copied block")},
    }
    lanes = {}
    for kind in EVENT_KINDS:
        if (lane := kind.lane) is not None:
            title = kind.plural.capitalize()
            lanes[kind.name] = TickLane(title, lane.color, lane.column, lane.counted or kind.noun, kind.name)
            lanes |= beside.get(kind.name, {})
    return lanes


TICK_LANES: Final = _tick_lanes()
MARKS: Final = "marks"
"""There is no such lane while nothing is marked."""
STEPS: Final = "steps"
"""Tokens of each second; of each step, seen so near."""
PAUSED: Final = "paused"
"""When the engine stood still."""
LANES: Final = (
    Lane(MARKS, "Bookmarks", 15, 18),
    Lane("usage", "KV usage", 24, 46),
    Lane("running", "Running", 15, 26),
    Lane("waiting", "Waiting", 15, 26),
    Lane(STEPS, "Steps", 18, 30),
    *(Lane(name, lane.title, 11, 14) for name, lane in TICK_LANES.items()),
    Lane("gaps", "Gaps", 11, 14),
    Lane(PAUSED, "Paused", 11, 14),
)
CURVES: Final = ("usage", "running", "waiting")


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Of a widget of a size."""

    width: int
    height: int
    bare: frozenset[str] = frozenset()
    """Lanes that nothing ever happened in: a low widget leaves them out."""

    @property
    def chart_width(self) -> int:
        """Of the time axis."""
        return max(self.width - gutter(), 1)

    def boxes(self) -> Iterator[tuple[Lane, int, int]]:
        """Each lane with its top and its height."""
        top = axis_height()
        is_low = self.height < _LOW
        for lane in LANES:
            if lane.name in self.bare and (is_low or lane.name == MARKS):
                continue
            height = scaled(lane.low if is_low else lane.high)
            yield lane, top, height
            top += height + _GAP

    @property
    def requests_top(self) -> int:
        """Where the lanes of requests begin."""
        return self.legend_top + (scaled(LEGEND_HEIGHT) if self.has_legend else 0)

    @property
    def legend_top(self) -> int:
        """Where the line of colours is, above the requests."""
        _, top, height = list(self.boxes())[-1]
        return top + height + 3 * _GAP

    @property
    def has_legend(self) -> bool:
        """Whether there is room for it."""
        return self.height >= _LEGEND_FROM

    @property
    def num_rows(self) -> int:
        """Rows of requests that can be seen whole, at least one."""
        return max(1, (self.height - self.requests_top) // row_height())

    def lane_at(self, y: int) -> Lane | None:
        """Which lane above the requests is there."""
        return next((lane for lane, top, height in self.boxes() if top <= y < top + height + _GAP), None)

    def row_at(self, y: int, first_row: int) -> int | None:
        """Which row of requests is there."""
        return None if y < self.requests_top else first_row + (y - self.requests_top) // row_height()

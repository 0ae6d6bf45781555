"""Lanes of the timeline and their pixel positions in the widget. Contains no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS

GUTTER: Final = 104
"""Width of the lane names, left of the time axis, in pixels at 100 % scale."""
AXIS_HEIGHT: Final = 20
_GAP: Final = 2
ROW_HEIGHT: Final = 15
_LOW: Final = 380
"""Widget height, at 100 % scale, below which the lanes are lower too."""
LEGEND_HEIGHT: Final = 16
_LEGEND_FROM: Final = 300
"""Minimum widget height for the legend of request colours."""
_MIN_ROWS: Final = 4
"""Rows of requests that take precedence over the last lanes: if not everything fits, those lanes scroll."""
_NUM_FIXED: Final = 2
"""Number of lanes at the top that never scroll."""


def gutter() -> int:
    """Return `GUTTER` in pixels at the current scale."""
    return scaled(GUTTER)


def axis_height() -> int:
    """Return the height of the time axis in pixels at the current scale."""
    return scaled(AXIS_HEIGHT)


def row_height() -> int:
    """Return the height of a request row in pixels at the current scale."""
    return scaled(ROW_HEIGHT)


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    title: str
    low: int
    high: int
    """Height in a high widget; `low` is that in a low one. Both in pixels at 100 % scale."""


@dataclass(frozen=True, slots=True)
class TickLane:
    """Lane with a mark for each moment in which something happened."""

    title: str
    color: str
    """Name of the colour in the theme."""
    column: str
    """Summary column with the number per second; empty if it is not counted."""
    counted: str
    """Noun for one counted item."""
    kind: str = ""
    """Event kind shown in this lane, or "" if only per-second counts exist."""


def _tick_lanes() -> dict[str, TickLane]:
    """Return the lanes by name: one per event kind that has a lane, each followed by related lanes that only per-second
    counts fill."""
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
"""Name of the bookmark lane, which exists only while there are bookmarks."""
STEPS: Final = "steps"
"""Name of the lane of tokens per second; when zoomed in, per step."""
PAUSED: Final = "paused"
"""Name of the lane of times in which the engine was paused or suspended."""
LANES: Final = (
    Lane(MARKS, "Bookmarks", 14, 18),
    Lane("usage", "KV usage", 18, 46),
    Lane("running", "Running", 12, 26),
    Lane("waiting", "Waiting", 12, 26),
    Lane(STEPS, "Steps", 14, 30),
    *(Lane(name, lane.title, 11, 14) for name, lane in TICK_LANES.items()),
    Lane("gaps", "Gaps", 11, 14),
    Lane(PAUSED, "Paused", 11, 14),
)
CURVES: Final = ("usage", "running", "waiting")


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Positions of the lanes in a widget of this size.

    If a widget is too low for all lanes and `_MIN_ROWS` rows of requests, the last lanes scroll: `first_row` is the
    index of the first visible row of requests, or, if negative, minus the number of these lanes that are shown.
    """

    width: int
    height: int
    bare: frozenset[str] = frozenset()
    """Names of the lanes without any data, which a low widget leaves out."""
    first_row: int = 0
    has_requests: bool = True
    """Whether there are rows of requests that need space."""

    @property
    def chart_width(self) -> int:
        """Width of the time axis in pixels."""
        return max(self.width - gutter(), 1)

    @property
    def num_scrolling(self) -> int:
        """Number of lanes that are hidden while the first row of requests is at the top."""
        lanes = self._lanes()
        rest = self.height - axis_height() - 2 * _GAP - self._legend_height - _MIN_ROWS * row_height()
        rest -= sum(self._height_of(lane) + _GAP for lane in lanes)
        num = 0
        while rest < 0 and num < len(lanes) - _NUM_FIXED and self.has_requests:
            num += 1
            rest += self._height_of(lanes[-num]) + _GAP
        return num

    def boxes(self) -> Iterator[tuple[Lane, int, int]]:
        top, lanes = axis_height(), self._lanes()
        num_scrolling = self.num_scrolling
        num_shown = min(max(-self.first_row, 0), num_scrolling)
        fixed = len(lanes) - num_scrolling
        for lane in (*lanes[:fixed], *lanes[len(lanes) - num_shown :]):
            height = self._height_of(lane)
            yield lane, top, height
            top += height + _GAP

    def _lanes(self) -> list[Lane]:
        return [lane for lane in LANES if lane.name not in self.bare or not (self._is_low or lane.name == MARKS)]

    @property
    def _is_low(self) -> bool:
        return self.height < _LOW

    def _height_of(self, lane: Lane) -> int:
        return scaled(lane.low if self._is_low else lane.high)

    @property
    def _legend_height(self) -> int:
        return scaled(LEGEND_HEIGHT) if self.has_legend else 0

    @property
    def requests_top(self) -> int:
        return self.legend_top + self._legend_height

    @property
    def legend_top(self) -> int:
        _, top, height = list(self.boxes())[-1]
        return top + height + 3 * _GAP

    @property
    def has_legend(self) -> bool:
        return self.height >= _LEGEND_FROM

    @property
    def num_rows(self) -> int:
        """Number of request rows that are fully visible, at least one."""
        return max(1, (self.height - self.requests_top) // row_height())

    def lane_at(self, y: int) -> Lane | None:
        return next((lane for lane, top, height in self.boxes() if top <= y < top + height + _GAP), None)

    def row_at(self, y: int) -> int | None:
        return None if y < self.requests_top else max(self.first_row, 0) + (y - self.requests_top) // row_height()

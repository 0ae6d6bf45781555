"""Lanes of the timeline and their pixel positions in the widget. Must not depend on the session's data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS

GUTTER: Final = 104
"""Width of the column of lane names at the left, in pixels at 100 % scale."""
AXIS_HEIGHT: Final = 20
_GAP: Final = 2
ROW_HEIGHT: Final = 15
_LOW_HEIGHT: Final = 380
LEGEND_HEIGHT: Final = 16
_MIN_HEIGHT_FOR_LEGEND: Final = 300
_MIN_ROWS: Final = 4
"""Number of request rows to keep visible. The last lanes scroll if there is no space for them above these rows."""
_NUM_FIXED_LANES: Final = 2


def gutter() -> int:
    return scaled(GUTTER)


def axis_height() -> int:
    return scaled(AXIS_HEIGHT)


def row_height() -> int:
    return scaled(ROW_HEIGHT)


@dataclass(frozen=True, slots=True)
class Lane:
    """Lane above the requests. It has `low_height` in a low widget and `full_height` in all others, in pixels
    at 100 % scale.
    """

    name: str
    title: str
    low_height: int
    full_height: int


@dataclass(frozen=True, slots=True)
class TickLane:
    """Lane with ticks for events of one kind, or for the seconds in which something was counted."""

    title: str
    color: str
    column: str
    """Column of the per-second summaries that counts the lane's items; "" if there is no such column."""
    noun: str
    """Singular noun for a counted item."""
    kind: str = ""
    """Kind of the events shown in this lane, or "" if only per-second counts exist."""


def _tick_lanes() -> dict[str, TickLane]:
    """Return the tick lanes by name, in display order. The lane of an event kind is followed by related lanes,
    such as swaps after preemptions.
    """
    related = {
        "preempted": {"swapped": TickLane("Swaps", "flash_saved", "swapped_blocks", "swapped block", "preempted")},
        "evicted": {"copied": TickLane("Copy-on-write", "flash_copied", "copied_blocks", "copied block")},
    }
    lanes = {}
    for kind in EVENT_KINDS:
        if (lane := kind.lane) is not None:
            title = kind.plural.capitalize()
            lanes[kind.name] = TickLane(title, lane.color, lane.column, lane.counted or kind.noun, kind.name)
            lanes |= related.get(kind.name, {})
    return lanes


TICK_LANES: Final = _tick_lanes()
MARKS: Final = "marks"
"""Name of the bookmark lane, which is shown only if there are bookmarks."""
STEPS: Final = "steps"
"""Name of the lane that shows tokens per second or, when zoomed in, per step."""
PAUSED: Final = "paused"
"""Name of the lane that shows when the engine was paused or suspended."""
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


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Positions of the lanes in a widget of `width` x `height` pixels.

    If the lanes and `_MIN_ROWS` request rows do not fit, the last lanes scroll with the requests. `first_row` is the
    index of the first visible request row. If it is negative, `-first_row` of the scrolling lanes are visible above the
    requests.
    """

    width: int
    height: int
    empty_lanes: frozenset[str] = frozenset()
    """Names of the lanes without data, which are hidden in a low widget."""
    first_row: int = 0
    has_requests: bool = True

    @property
    def chart_width(self) -> int:
        return max(self.width - gutter(), 1)

    @property
    def num_scrolling(self) -> int:
        """Number of lanes that scroll with the requests. They are hidden while the first request row is at the top."""
        lanes = self._lanes()
        free_height = self.height - axis_height() - 2 * _GAP - self._legend_height - _MIN_ROWS * row_height()
        free_height -= sum(self._height_of(lane) + _GAP for lane in lanes)
        num_hidden = 0
        while free_height < 0 and num_hidden < len(lanes) - _NUM_FIXED_LANES and self.has_requests:
            num_hidden += 1
            free_height += self._height_of(lanes[-num_hidden]) + _GAP
        return num_hidden

    def boxes(self) -> Iterator[tuple[Lane, int, int]]:
        """Yield (lane, top, height) of each visible lane, in pixels."""
        top, lanes = axis_height(), self._lanes()
        num_scrolling = self.num_scrolling
        num_shown = min(max(-self.first_row, 0), num_scrolling)
        num_fixed = len(lanes) - num_scrolling
        for lane in (*lanes[:num_fixed], *lanes[len(lanes) - num_shown :]):
            height = self._height_of(lane)
            yield lane, top, height
            top += height + _GAP

    def _lanes(self) -> list[Lane]:
        return [lane for lane in LANES if lane.name not in self.empty_lanes or not (self._is_low or lane.name == MARKS)]

    @property
    def _is_low(self) -> bool:
        return self.height < _LOW_HEIGHT

    def _height_of(self, lane: Lane) -> int:
        return scaled(lane.low_height if self._is_low else lane.full_height)

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
        return self.height >= _MIN_HEIGHT_FOR_LEGEND

    @property
    def num_rows(self) -> int:
        return max(1, (self.height - self.requests_top) // row_height())

    def lane_at(self, y: int) -> Lane | None:
        return next((lane for lane, top, height in self.boxes() if top <= y < top + height + _GAP), None)

    def row_at(self, y: int) -> int | None:
        return None if y < self.requests_top else max(self.first_row, 0) + (y - self.requests_top) // row_height()

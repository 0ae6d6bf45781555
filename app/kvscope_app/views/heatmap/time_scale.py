"""Which times are shown: whole columns of pixels, each of so many nanoseconds. Knows no Qt.

Columns are counted from 1970, so that a moment lies in the same column while the picture scrolls, and what was drawn
of it stays right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.summaries.summary import SECOND_NS

MIN_COLUMN_NS: Final = SECOND_NS // 50
MAX_COLUMN_NS: Final = 3600 * SECOND_NS
FIRST_COLUMN_NS: Final = SECOND_NS // 32
"""An overview of few seconds is not drawn wider than this unless the person zooms in."""
_LADDER: Final = 1.1
"""How an overview that grows is fitted: rarely, each time with some room."""


@dataclass(frozen=True, slots=True)
class TimeScale:
    """`width` columns from column `first` on."""

    first: int = 0
    width: int = 1
    column_ns: int = SECOND_NS

    @property
    def begin_ns(self) -> int:
        """Left edge."""
        return self.first * self.column_ns

    @property
    def end_ns(self) -> int:
        """Right edge."""
        return (self.first + self.width) * self.column_ns

    def time_at(self, x: float) -> int:
        """The moment at column `x` of the picture."""
        return int((self.first + x) * self.column_ns) if x % 1 else (self.first + int(x)) * self.column_ns

    def x_of(self, time_ns: int) -> float:
        """Where a moment is in the picture, in columns; beyond it when it is not shown."""
        return (time_ns - self.begin_ns) / self.column_ns

    def resized(self, width: int) -> TimeScale:
        """Wider or narrower, the right edge where it is."""
        return replace(self, first=self.first + self.width - width, width=width)

    def moved(self, columns: int) -> TimeScale:
        """Later by `columns`."""
        return replace(self, first=self.first + columns)

    def zoomed(self, factor: float, x: float) -> TimeScale:
        """Closer by `factor`; the moment at column `x` stays where it is."""
        wanted = round(self.column_ns / factor)
        column_ns = min(max(wanted, min(MIN_COLUMN_NS, self.column_ns)), MAX_COLUMN_NS)
        return TimeScale(round(self.time_at(x) / column_ns - x), self.width, column_ns)

    def ending_at(self, time_ns: int) -> TimeScale:
        """The column of the moment before `time_ns` is the last."""
        return replace(self, first=-(-time_ns // self.column_ns) - self.width)

    def fitted(self, begin_ns: int, end_ns: int) -> TimeScale:
        """All from `begin_ns` to `end_ns`, with some room to grow."""
        needed = max((end_ns - begin_ns) / max(self.width - 1, 1) / FIRST_COLUMN_NS, 1.0)
        steps = math.ceil(math.log(needed, _LADDER) - 1e-9)
        column_ns = min(math.ceil(FIRST_COLUMN_NS * _LADDER**steps), MAX_COLUMN_NS)
        return TimeScale(begin_ns // column_ns, self.width, column_ns)

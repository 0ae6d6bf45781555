"""Visible time as whole pixel columns of equal duration. Imports no Qt.

Columns are counted from 1970. A time keeps its column while the picture scrolls, so that drawn columns stay valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.summaries.summary import SECOND_NS

MIN_COLUMN_NS: Final = SECOND_NS // 50
MAX_COLUMN_NS: Final = 3600 * SECOND_NS
FIRST_COLUMN_NS: Final = SECOND_NS // 32
"""Minimum duration of a column when fitting. A short overview is stretched further only if the user zooms in."""
_STEP_RATIO: Final = 1.1
"""Ratio of successive column durations when a growing overview is fitted, so that refits are rare."""


@dataclass(frozen=True, slots=True)
class TimeScale:
    """`width` columns of `column_ns` nanoseconds each, starting with column `first`."""

    first: int = 0
    width: int = 1
    column_ns: int = SECOND_NS

    @property
    def begin_ns(self) -> int:
        return self.first * self.column_ns

    @property
    def end_ns(self) -> int:
        return (self.first + self.width) * self.column_ns

    def time_at(self, x: float) -> int:
        return int((self.first + x) * self.column_ns) if x % 1 else (self.first + int(x)) * self.column_ns

    def x_of(self, time_ns: int) -> float:
        """Return the fractional column of `time_ns`, which is outside 0 to `width` if the time is not visible."""
        return (time_ns - self.begin_ns) / self.column_ns

    def resized(self, width: int) -> TimeScale:
        return replace(self, first=self.first + self.width - width, width=width)

    def moved(self, columns: int) -> TimeScale:
        return replace(self, first=self.first + columns)

    def zoomed(self, factor: float, x: float) -> TimeScale:
        """Return a scale zoomed in by `factor`, with the time at column `x` staying at that column."""
        requested_ns = round(self.column_ns / factor)
        column_ns = min(max(requested_ns, min(MIN_COLUMN_NS, self.column_ns)), MAX_COLUMN_NS)
        return TimeScale(round(self.time_at(x) / column_ns - x), self.width, column_ns)

    def ending_at(self, time_ns: int) -> TimeScale:
        return replace(self, first=-(-time_ns // self.column_ns) - self.width)

    def fitted(self, begin_ns: int, end_ns: int) -> TimeScale:
        """Return a scale that covers `begin_ns` to `end_ns` with some space to grow."""
        ratio = max((end_ns - begin_ns) / max(self.width - 1, 1) / FIRST_COLUMN_NS, 1.0)
        steps = math.ceil(math.log(ratio, _STEP_RATIO) - 1e-9)
        column_ns = min(math.ceil(FIRST_COLUMN_NS * _STEP_RATIO**steps), MAX_COLUMN_NS)
        return TimeScale(begin_ns // column_ns, self.width, column_ns)

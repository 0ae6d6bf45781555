"""Formats times of day the same way in every view."""

from __future__ import annotations

import time
from typing import Final

_SECOND_NS: Final = 1_000_000_000


def clock_text(time_ns: int) -> str:
    """Format a wall-clock time (ns since 1970) as local time: `14:03:27.125`.

    Milliseconds are truncated, so that no time appears later than it was.
    """
    local = time.localtime(time_ns // _SECOND_NS)
    return time.strftime("%H:%M:%S", local) + f".{time_ns // 1_000_000 % 1000:03d}"


def wall_text(time_ns: int) -> str:
    """Format a wall-clock time like `clock_text`, with the date if it is not today."""
    local, today = time.localtime(time_ns // _SECOND_NS), time.localtime()
    day = "" if local[:3] == today[:3] else time.strftime("%Y-%m-%d ", local)
    return day + clock_text(time_ns)

"""Round times for the labels of a time axis, from days down to fractions of a millisecond. Imports no Qt."""

from __future__ import annotations

import math
import time
from typing import Final

from kvscope_app.session.time_span import TimeSpan

_SECOND: Final = 1_000_000_000
_DAY: Final = 86_400 * _SECOND
_STEPS_NS: Final = (
    *(digit * 10**power for power in range(4, 9) for digit in (1, 2, 5)),
    *(seconds * _SECOND for seconds in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200)),
)


def axis_times(span: TimeSpan, width: int, min_spacing: int = 90) -> list[tuple[int, str]]:
    """Return (time in ns, label) pairs at least `min_spacing` pixels apart on an axis of `width` pixels."""
    min_step_ns = span.length_ns * min_spacing / max(width, 1)
    step = next((step for step in _STEPS_NS if step >= min_step_ns), 0) or math.ceil(min_step_ns / _DAY) * _DAY
    offset = time.localtime(span.begin_ns // _SECOND).tm_gmtoff * _SECOND
    first = -(-(span.begin_ns + offset) // step) * step - offset
    return [(time_ns, time_text(time_ns, step)) for time_ns in range(first, span.end_ns + 1, step)]


def time_text(time_ns: int, step_ns: int) -> str:
    """Return a label such as `2026-11-29`, `14:03`, `14:03:20` or `14:03:20.125`, depending on `step_ns`, the time
    between labels.
    """
    local = time.localtime(time_ns // _SECOND)
    if step_ns >= _DAY:
        return time.strftime("%Y-%m-%d", local)
    if step_ns >= 60 * _SECOND:
        return time.strftime("%H:%M", local)
    text = time.strftime("%H:%M:%S", local)
    if step_ns >= _SECOND:
        return text
    digits = 3 if step_ns >= 1_000_000 else 5
    return text + f".{time_ns % _SECOND:09d}"[: digits + 1]

"""Formats numbers for display, with units and grouped digits. Unknown values are never shown as zero."""

from __future__ import annotations

import math
import re
from typing import Final

UNKNOWN: Final = "unknown"
NOTHING: Final = "–"
_NARROW_SPACE: Final = "\u202f"
_WHOLE_NUMBER: Final = re.compile(r"(?<![\w.:/#=-])\d{4,15}(?![\w:/=-]|\.\d)")


def count(value: float) -> str:
    """Format a whole number with grouped digits: `12 345`."""
    return f"{round(value):,}".replace(",", _NARROW_SPACE)


def grouped(text: str) -> str:
    """Group the digits of whole numbers in `text` as `count` does, except in names and addresses."""
    return _WHOLE_NUMBER.sub(lambda match: count(int(match[0])), text)


def short(value: float) -> str:
    """Format a number in few characters: `0.4`, `12`, `1 234`, `12.5 k`, `3.4 M`. Infinity and NaN become `–`."""
    if not math.isfinite(value):
        return NOTHING
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            return f"{value / limit * (10 if limit == 1e4 else 1):.3g}{suffix}"
    return count(value) if value >= 100 or value == int(value) else f"{value:.1f}"


def rate(value: float, unit: str) -> str:
    """Format a number with a unit: `1 234 tok/s`. Infinity and NaN become `–`."""
    return f"{short(value)} {unit}" if math.isfinite(value) else NOTHING


def num_bytes(value: float | None) -> str:
    """Format bytes in binary units: `1.50 GiB`. None, NaN, infinity and negative numbers become `unknown`."""
    if value is None or value < 0 or not math.isfinite(value):
        return UNKNOWN
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            scaled = value / limit
            return f"{scaled:.2f} {unit}" if scaled < 10 else f"{scaled:.1f} {unit}"
    return f"{round(value)} B"


def signed_bytes(value: float | None) -> str:
    """Format bytes that may be negative: `−1.50 GiB`."""
    return f"−{num_bytes(-value)}" if value is not None and value < 0 else num_bytes(value)


def percent(share: float | None, digits: int = 1) -> str:
    """Format a fraction of 1 as a percentage: `12.3 %`. None, NaN and infinity become `unknown`."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{share * 100:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Format a duration: `640 µs`, `8.2 ms`, `1.25 s`, `3:07 min`, `2:05 h`. None, NaN and infinity become `–`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    if value < 3600:
        return f"{int(value // 60)}:{int(value % 60):02d} min"
    return f"{int(value // 3600)}:{int(value % 3600 // 60):02d} h"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: `1 block`, `2 blocks`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"

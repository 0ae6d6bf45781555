"""Calls driver functions that may fail. A failure makes one value None and leaves the other values of a sample
intact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def known(read: Callable[[], _Value | None]) -> _Value | None:
    """Return the result of `read`, or None if it raises. Drivers fail in ways that no list of exceptions covers."""
    try:
        return read()
    except Exception:
        return None


def counted(read: Callable[[], int | None]) -> int | None:
    """Return the result of `read` as an integer; None if it raises, is None, or is not in 0 to 2**63 - 1."""
    value = known(lambda: int(result) if (result := read()) is not None else None)
    return value if value is not None and 0 <= value < 1 << 63 else None


def measured(read: Callable[[], float | None]) -> float | None:
    """Return the result of `read` as a float; None if it raises, is None, or is not finite and non-negative."""
    value = known(lambda: float(result) if (result := read()) is not None else None)
    return value if value is not None and 0 <= value < float("inf") else None

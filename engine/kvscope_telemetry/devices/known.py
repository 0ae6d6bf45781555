"""Reads values that may be missing: any failure makes one figure unknown, and spoils no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def known(ask: Callable[[], _Value | None]) -> _Value | None:
    """Return what `ask` returns, or None for any failure: drivers fail in ways that no list of exceptions covers."""
    try:
        return ask()
    except Exception:
        return None


def counted(ask: Callable[[], int | None]) -> int | None:
    """Return a whole number that is not negative, else None."""
    value = known(lambda: int(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < 1 << 63 else None


def measured(ask: Callable[[], float | None]) -> float | None:
    """Return a number that is not negative, else None."""
    value = known(lambda: float(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < float("inf") else None

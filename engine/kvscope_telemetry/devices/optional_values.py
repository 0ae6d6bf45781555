"""Reads values that may be missing: a failure makes one figure unknown and affects no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def known(ask: Callable[[], _Value | None]) -> _Value | None:
    """Return what `ask` returns, or None if it raises. Drivers fail in ways that no list of exceptions covers."""
    try:
        return ask()
    except Exception:
        return None


def counted(ask: Callable[[], int | None]) -> int | None:
    """Return a non-negative integer below 2**63, else None."""
    value = known(lambda: int(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < 1 << 63 else None


def measured(ask: Callable[[], float | None]) -> float | None:
    """Return a finite non-negative number, else None."""
    value = known(lambda: float(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < float("inf") else None

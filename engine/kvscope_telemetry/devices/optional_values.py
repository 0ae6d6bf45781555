"""Reads values that may be missing: a failure makes one figure unknown and affects no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def known(ask: Callable[[], _Value | None]) -> _Value | None:
    """Return the result of `ask`, or None if it raises. Drivers fail in ways that no list of exceptions covers."""
    try:
        return ask()
    except Exception:
        return None


def counted(ask: Callable[[], int | None]) -> int | None:
    """Return the result of `ask` as an integer; None if it raises, is None, or is not in 0 to 2**63 - 1."""
    value = known(lambda: int(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < 1 << 63 else None


def measured(ask: Callable[[], float | None]) -> float | None:
    """Return the result of `ask` as a float; None if it raises, is None, or is not finite and non-negative."""
    value = known(lambda: float(said) if (said := ask()) is not None else None)
    return value if value is not None and 0 <= value < float("inf") else None

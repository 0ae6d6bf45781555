"""Whether a difference between two runs is larger than what each run varies by itself.

A run is cut into `NUM_WINDOWS` windows of equal length and a figure is taken in each. Seconds depend on each other: a
request holds its blocks for many of them. So a standard error over seconds, or over 10 s each, calls one run in three
different from itself. Few long windows hardly do, and Student's t is right for few (Ibragimov and Müller 2010, doi
10.1198/jbes.2009.08046). The errors of both runs are joined after Welch: two runs of the same are that near in 19 of 20
cases. Knows no figures and no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
NUM_WINDOWS: Final = 5
"""Halves of one run whose seconds go with each other over 20 s are found equal in 93 % of the cases from 5 minutes a
half on; by 8 windows in 89 %, by windows of 10 s in 66 %."""
MIN_WINDOW_S: Final = 2.0
"""Windows of less say nothing."""
_FEWEST: Final = 3
"""Windows in which a figure must be known."""
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t that 97.5 % are below, for 1 degree of freedom and more."""
_NOTHING: Final = 1e-9
"""Of the larger value: what is less is rounding."""


class Verdict(StrEnum):
    """What a difference is beside the runs' own spread."""

    EQUAL = "equal"
    WITHIN = "within the runs' own spread"
    LARGER = "larger than the runs' own spread"
    UNTOLD = "too little to tell"
    NONE = ""
    """Nothing is known of one of them, or the figure has no spread of its own: a length, a count, a peak."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure in one run; None where there are too few windows to tell."""

    standard_error: float | None
    num_windows: int

    @property
    def within(self) -> float | None:
        """The figure of another run of the same kind, as long as this one and without a spread, is that near in 19 of
        20 cases."""
        if self.standard_error is None:
            return None
        return _T_975[min(self.num_windows - 1, len(_T_975)) - 1] * self.standard_error


@dataclass(frozen=True, slots=True)
class Judged:
    """A difference, and what it is beside the spread of both."""

    verdict: Verdict
    within: float | None = None
    """Two runs of the same are that near in 19 of 20 cases."""
    times: float | None = None
    """How many times that the difference is; None where it is not known, or there is no spread at all."""


UNKNOWN_SPREAD: Final = Spread(None, 0)


def spread_of(values: FloatArray) -> Spread:
    """Of a run whose windows have these values, shape (windows,), NaN where not known."""
    known = values[np.isfinite(values)]
    if known.size < _FEWEST:
        return Spread(None, int(known.size))
    return Spread(float(known.std(ddof=1)) / math.sqrt(known.size), int(known.size))


def judge(a: float | None, b: float | None, of_a: Spread, of_b: Spread) -> Judged:
    """What `b - a` is."""
    if a is None or b is None:
        return Judged(Verdict.NONE)
    difference = abs(b - a)
    is_nothing = difference <= _NOTHING * max(abs(a), abs(b))
    if of_a.standard_error is None or of_b.standard_error is None:
        return Judged(Verdict.EQUAL if is_nothing else Verdict.UNTOLD)
    within = _joined(of_a.standard_error, of_a.num_windows, of_b.standard_error, of_b.num_windows)
    times = difference / within if within > 0 else None
    if is_nothing:
        return Judged(Verdict.EQUAL, within, 0.0)
    return Judged(Verdict.WITHIN if difference <= within else Verdict.LARGER, within, times)


def _joined(error_a: float, num_a: int, error_b: float, num_b: int) -> float:
    """Welch's: t of as many degrees of freedom as both have together, times the error of the difference."""
    of_a, of_b = error_a**2, error_b**2
    parts = of_a**2 / (num_a - 1) + of_b**2 / (num_b - 1)
    if parts <= 0:
        return 0.0
    freedom = max(1, int((of_a + of_b) ** 2 / parts + _NOTHING))
    return _T_975[min(freedom, len(_T_975)) - 1] * math.sqrt(of_a + of_b)

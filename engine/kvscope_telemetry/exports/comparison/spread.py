"""Whether two runs differ by more than each varies by itself, and by how much they may differ.

A run is cut into `NUM_WINDOWS` windows of equal length and a figure is taken in each. Seconds depend on each other: a
request holds its blocks for many of them. So a standard error over seconds, or over 10 s each, calls one run in three
different from itself. Few long windows hardly do, and Student's t is right for few (Ibragimov and Müller 2010, doi
10.1198/jbes.2009.08046). The errors of both runs are joined after Welch.

Times and rates are compared by their logarithms, as ratios (Fleming and Wallace 1986, doi 10.1145/5666.5673): they are
above 0 and skewed, and on a linear scale one slow window widens the error of a run until nothing is far from it. What
may be 0, and shares, are compared as they are. A test that does not tell two runs apart says nothing of their being
alike: the interval says how far apart they may be. Knows no figures and no files.
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
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t that 97.5 % are below, for 1 degree of freedom and more."""
_NOTHING: Final = 1e-9
"""Of the larger value: what is less is rounding."""


class Verdict(StrEnum):
    """Whether a difference is larger than the runs' own variation."""

    EQUAL = "equal"
    OPEN = "not significant"
    """Two runs of the same may be as far apart: that they are alike is not said."""
    DIFFERENT = "different"
    """Two runs of the same are that far apart in 1 of 20 cases."""
    UNTOLD = "not enough data"
    NONE = ""
    """Nothing is known of one of them, or a run does not tell how much the figure varies: a length, a count, a peak."""


class Method(StrEnum):
    """The test by which a difference was judged."""

    RATIO = "Welch's t of logarithms"
    DIFFERENCE = "Welch's t"
    NONE = ""


@dataclass(frozen=True, slots=True)
class JudgedDifference:
    """A difference, the test that judged it, and its 95 % interval."""

    verdict: Verdict
    test: Method = Method.NONE
    num_a: int = 0
    """Windows of A in which the figure is known."""
    num_b: int = 0
    low: float | None = None
    """Of b / a by the test of ratios, of b - a by the other; None where there is no test."""
    high: float | None = None


def judge(a: float | None, b: float | None, of_a: FloatArray, of_b: FloatArray, *, is_ratio: bool) -> JudgedDifference:
    """Judge the difference between `a` and `b`, the figures of two whole runs. `of_a`, `of_b`: the figure in each run's
    windows, shape (windows,), NaN where not known. `is_ratio`: the figure is a time or a rate.
    """
    if a is None or b is None:
        return JudgedDifference(Verdict.NONE)
    of_a, of_b = of_a[np.isfinite(of_a)], of_b[np.isfinite(of_b)]
    num_a, num_b = int(of_a.size), int(of_b.size)
    is_equal = abs(b - a) <= _NOTHING * max(abs(a), abs(b))
    if min(num_a, num_b) < _FEWEST:
        return JudgedDifference(Verdict.EQUAL if is_equal else Verdict.UNTOLD, Method.NONE, num_a, num_b)
    if is_ratio and min(a, b, *of_a.tolist(), *of_b.tolist()) > 0:
        distance, near = math.log(b / a), _near(np.log(of_a), np.log(of_b))
        test, low, high = Method.RATIO, math.exp(distance - near), math.exp(distance + near)
    else:
        distance, near = b - a, _near(of_a, of_b)
        test, low, high = Method.DIFFERENCE, distance - near, distance + near
    verdict = Verdict.EQUAL if is_equal else Verdict.OPEN if abs(distance) <= near else Verdict.DIFFERENT
    return JudgedDifference(verdict, test, num_a, num_b, low, high)


def _near(of_a: FloatArray, of_b: FloatArray) -> float:
    """Two runs of the same are that near in 19 of 20 cases. Welch's: t of as many degrees of freedom as both have
    together, times the error of the difference."""
    error_a, error_b = (float(each.var(ddof=1)) / each.size for each in (of_a, of_b))
    parts = error_a**2 / (of_a.size - 1) + error_b**2 / (of_b.size - 1)
    if parts <= 0:
        return 0.0
    freedom = max(1, int((error_a + error_b) ** 2 / parts + _NOTHING))
    return _T_975[min(freedom, len(_T_975)) - 1] * math.sqrt(error_a + error_b)

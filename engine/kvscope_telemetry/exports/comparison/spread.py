"""Tests whether two runs differ by more than each varies by itself, and estimates the interval of the difference.

A run is cut into `NUM_WINDOWS` windows of equal length, and a figure is measured in each. Seconds are correlated,
because a request holds its blocks for many of them. Therefore a standard error over seconds, or over intervals of 10 s,
finds one in three runs different from itself. A few long windows are hardly correlated, and Student's t is valid for
few samples (Ibragimov and Mueller 2010, doi 10.1198/jbes.2009.08046). The errors of both runs are combined by Welch's
method.

Times and rates are compared by their logarithms, as ratios (Fleming and Wallace 1986, doi 10.1145/5666.5673): they are
positive and skewed, and on a linear scale one slow window would increase a run's error so much that no difference is
significant. Figures that may be 0, and shares, are compared by difference. If the test finds no difference, this does
not prove that the runs are equal: the interval shows how far apart they may be. Must not depend on the list of figures
or on files.
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
"""Windows per run. With seconds correlated over 20 s, two halves of one run are found equal in 93 % of the cases if a
half has at least 5 minutes; with 8 windows in 89 %, with windows of 10 s in 66 %.
"""
MIN_WINDOW_S: Final = 2.0
"""Minimum length of a window. Shorter ones give no meaningful figures."""
_MIN_WINDOWS: Final = 3
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5 % quantiles of Student's t for 1, 2, 3, ... degrees of freedom."""
_RELATIVE_TOLERANCE: Final = 1e-9
"""Relative difference up to which values count as equal, to allow for rounding."""


class Verdict(StrEnum):
    """Result of the test whether a difference exceeds the variation within the runs."""

    EQUAL = "equal"
    OPEN = "not significant"
    """The difference may be chance: two runs with the same settings can differ as much. This does not prove that the
    runs are equal.
    """
    DIFFERENT = "different"
    """Two runs with the same settings differ this much in at most 1 of 20 cases."""
    UNKNOWN = "not enough data"
    NONE = ""
    """Not tested, because the figure is unknown in one of the runs, or because a run has only one value of it (a
    length, a count or a peak).
    """


class Method(StrEnum):
    RATIO = "Welch's t of logarithms"
    DIFFERENCE = "Welch's t"
    NONE = ""


@dataclass(frozen=True, slots=True)
class JudgedDifference:
    verdict: Verdict
    test: Method = Method.NONE
    num_a: int = 0
    num_b: int = 0
    low: float | None = None
    """Lower end of the 95 % interval of b / a (ratio test) or b - a (difference test); None if nothing was tested."""
    high: float | None = None


def judge(a: float | None, b: float | None, of_a: FloatArray, of_b: FloatArray, *, is_ratio: bool) -> JudgedDifference:
    """Judge the difference between `a` and `b`, the figures of two whole runs.

    Args:
        a: Figure of the first run; None if unknown.
        b: Figure of the second run; None if unknown.
        of_a: The figure in the windows of the first run, shape (windows,), NaN if unknown.
        of_b: The figure in the windows of the second run.
        is_ratio: The figure is a time or a rate.
    """
    if a is None or b is None:
        return JudgedDifference(Verdict.NONE)
    of_a, of_b = of_a[np.isfinite(of_a)], of_b[np.isfinite(of_b)]
    num_a, num_b = int(of_a.size), int(of_b.size)
    is_equal = abs(b - a) <= _RELATIVE_TOLERANCE * max(abs(a), abs(b))
    if min(num_a, num_b) < _MIN_WINDOWS:
        return JudgedDifference(Verdict.EQUAL if is_equal else Verdict.UNKNOWN, Method.NONE, num_a, num_b)
    if is_ratio and min(a, b, *of_a.tolist(), *of_b.tolist()) > 0:
        distance, half_width = math.log(b / a), _half_interval(np.log(of_a), np.log(of_b))
        test, low, high = Method.RATIO, math.exp(distance - half_width), math.exp(distance + half_width)
    else:
        distance, half_width = b - a, _half_interval(of_a, of_b)
        test, low, high = Method.DIFFERENCE, distance - half_width, distance + half_width
    verdict = Verdict.EQUAL if is_equal else Verdict.OPEN if abs(distance) <= half_width else Verdict.DIFFERENT
    return JudgedDifference(verdict, test, num_a, num_b, low, high)


def _half_interval(of_a: FloatArray, of_b: FloatArray) -> float:
    """Return half the width of the 95 % interval of the difference, by Welch's t-test."""
    error_a, error_b = (float(each.var(ddof=1)) / each.size for each in (of_a, of_b))
    parts = error_a**2 / (of_a.size - 1) + error_b**2 / (of_b.size - 1)
    if parts <= 0:
        return 0.0
    freedom = max(1, int((error_a + error_b) ** 2 / parts + _RELATIVE_TOLERANCE))
    return _T_975[min(freedom, len(_T_975)) - 1] * math.sqrt(error_a + error_b)

"""Numpy preparation of curves: trailing means, min/max decimation, gaps. No Qt.

NaN is "nothing known": it survives a mean and a decimation, and no line is drawn to it.

See docs/internals/decisions/0010-curves-are-decimated-before-qt.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def trailing_mean(values: FloatArray, width: int) -> FloatArray:
    """Mean of each value and the `width - 1` before it, over those that are known; NaN stays NaN."""
    if width <= 1 or not values.size:
        return values
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


def decimate(x: FloatArray, y: FloatArray, max_columns: int, phase: int = 0) -> tuple[FloatArray, FloatArray]:
    """At most `max_columns` pairs of minimum and maximum. `phase`: absolute number of the first point, so
    that the same points fall together as the window moves on and the curve does not shimmer."""
    factor = -(-y.size // max(max_columns, 1))
    if factor <= 1:
        return x, y
    lead = phase % factor
    tail = -(lead + y.size) % factor
    columns = np.pad(y, (lead, tail), constant_values=np.nan).reshape(-1, factor)
    times = np.pad(x, (lead, tail), mode="edge").reshape(-1, factor)
    pairs = np.stack((np.fmin.reduce(columns, axis=1), np.fmax.reduce(columns, axis=1)), axis=1)
    return times[:, (0, -1)].ravel(), pairs.ravel()


def join_near(x: FloatArray, y: FloatArray, max_gap: float) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """The known points, and which of them are joined to the next: those at most `max_gap` apart."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    joined = np.zeros(x.size, bool)
    joined[:-1] = np.diff(x) <= max_gap
    return x, y, joined


def close_areas(
    x: FloatArray, y: FloatArray, joined: npt.NDArray[np.bool_], floor: float = 0.0
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """The same curve, down to `floor` on both sides of each gap: what is filled below it ends there as well.

    A floor below what is seen keeps out of sight what joins the two sides: nothing is known to be zero there.
    """
    before = np.flatnonzero(~joined[:-1])
    at = np.repeat(before + 1, 2)
    edges = np.stack((x[before], x[before + 1]), axis=1).ravel()
    closed = np.insert(x, at, edges), np.insert(y, at, floor)
    return *closed, np.arange(x.size + at.size) < x.size + at.size - 1


def gaps(x: FloatArray, known: npt.NDArray[np.bool_], patience: float) -> list[tuple[float, float]]:
    """Stretches of `x` where nothing is known, after the first that is. One that reaches the end counts only
    once it is longer than `patience`: something may still come."""
    known = known | ~np.logical_or.accumulate(known)
    edges = np.flatnonzero(np.diff(np.concatenate(([True], known, [True])).astype(np.int8)))
    last = x.size - 1
    found = [
        (float(x[max(start - 1, 0)]), float(x[min(stop, last)]))
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
    return [gap for gap in found if gap[1] < x[last] or gap[1] - gap[0] > patience]


def nearest(x: FloatArray, at: float) -> float:
    """Return the point of `x`, shape (n,), ascending and evenly spaced, that is nearest to `at`; `at` itself where it
    lies beyond both ends by more than the distance of two points.
    """
    if x.size < 2 or not 2 * x[0] - x[1] <= at <= 2 * x[-1] - x[-2]:
        return at
    return float(x[nearest_index(x, at)])


def nearest_index(x: FloatArray, at: float) -> int:
    """Return the index of the point of `x`, shape (n,), ascending, n > 0, that is nearest to `at`."""
    after = min(int(np.searchsorted(x, at)), x.size - 1)
    return after - 1 if after > 0 and at - x[after - 1] < x[after] - at else after


def nice_ceiling(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … at or above `value`, so that an axis ends on a round number."""
    if not np.isfinite(value) or value <= 0:
        return 1.0
    scale = 10.0 ** np.floor(np.log10(value))
    return float(next(step * scale for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value * (1 - 1e-9)))

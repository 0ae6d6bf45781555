"""Preparation of curves in numpy: trailing means, min/max decimation, gaps. Imports no Qt.

NaN means unknown: it survives means and decimation, and no line is drawn to it.

See docs/internals/decisions/0010-curves-are-decimated-before-qt.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def trailing_mean(values: FloatArray, width: int) -> FloatArray:
    """Return the mean of each value and the `width - 1` before it, over the known ones; NaN stays NaN."""
    if width <= 1 or not values.size:
        return values
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


def decimate(x: FloatArray, y: FloatArray, max_columns: int, phase: int = 0) -> tuple[FloatArray, FloatArray]:
    """Return at most `max_columns` pairs of minimum and maximum.

    `phase`: absolute index of the first point. It keeps groups of points stable as the window moves, so that the curve
    does not flicker.
    """
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
    """Return the known points, and a mask of those that are joined to the next: at most `max_gap` apart."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    joined = np.zeros(x.size, bool)
    joined[:-1] = np.diff(x) <= max_gap
    return x, y, joined


def close_areas(
    x: FloatArray, y: FloatArray, joined: npt.NDArray[np.bool_], floor: float = 0.0
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return the curve with a drop to `floor` on both sides of each gap, so that the area below it also ends there.

    Choose a floor below the visible range, so that the connection between the two sides is not seen: the value in a gap
    is not known to be zero.
    """
    before = np.flatnonzero(~joined[:-1])
    at = np.repeat(before + 1, 2)
    edges = np.stack((x[before], x[before + 1]), axis=1).ravel()
    closed = np.insert(x, at, edges), np.insert(y, at, floor)
    return *closed, np.arange(x.size + at.size) < x.size + at.size - 1


def gaps(x: FloatArray, known: npt.NDArray[np.bool_], patience: float) -> list[tuple[float, float]]:
    """Return stretches of `x` without known values, after the first known one.

    A stretch that reaches the end counts only if it is longer than `patience`, because data may still arrive.
    """
    known = known | ~np.logical_or.accumulate(known)
    edges = np.flatnonzero(np.diff(np.concatenate(([True], known, [True])).astype(np.int8)))
    last = x.size - 1
    found = [
        (float(x[max(start - 1, 0)]), float(x[min(stop, last)]))
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
    return [gap for gap in found if gap[1] < x[last] or gap[1] - gap[0] > patience]


def nearest(x: FloatArray, at: float) -> float:
    """Return the point of `x`, shape (n,), ascending and evenly spaced, that is nearest to `at`. Returns `at` itself if
    it is beyond either end by more than the spacing."""
    if x.size < 2 or not 2 * x[0] - x[1] <= at <= 2 * x[-1] - x[-2]:
        return at
    return float(x[nearest_index(x, at)])


def nearest_index(x: FloatArray, at: float) -> int:
    """Return the index of the point of `x`, shape (n,), ascending, n > 0, that is nearest to `at`."""
    after = min(int(np.searchsorted(x, at)), x.size - 1)
    return after - 1 if after > 0 and at - x[after - 1] < x[after] - at else after


def nice_ceiling(value: float) -> float:
    """Return the smallest 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten that is at least `value`; 1.0 if `value` is
    not positive and finite."""
    if not np.isfinite(value) or value <= 0:
        return 1.0
    scale = 10.0 ** np.floor(np.log10(value))
    return float(next(step * scale for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value * (1 - 1e-9)))
